// Draws what graph_page.py computed, searches it and moves about in it. DATA is the list of views.
const $ = (id) => document.getElementById(id),
  NS = "http://www.w3.org/2000/svg";
const plan = $("plan"),
  world = $("world"),
  map = $("map"),
  found = $("found"),
  search = $("search");
let view = DATA[0],
  number = 0,
  x = 0,
  y = 0,
  k = 1,
  marks = [],
  picked = -1,
  hits = [],
  at = -1;
// An element of a drawing.
function make(name, attributes, parent, text) {
  const e = document.createElementNS(NS, name);
  for (const a in attributes) e.setAttribute(a, attributes[a]);
  if (text !== undefined) e.textContent = text;
  parent.append(e);
  return e;
}
// An element of the page around it. Text goes in as text: names come from strangers.
function html(name, parent, text, css) {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (css) e.className = css;
  parent.append(e);
  return e;
}
// The path of an edge through its points: curves between layers, straight lines through them.
function route(p) {
  let d = "M" + p[0] + " " + p[1];
  for (let i = 2; i < p.length; i += 2) {
    const a = p[i - 2],
      b = p[i - 1],
      c = p[i],
      e = p[i + 1],
      m = (b + e) / 2;
    d += a == c ? "L" + c + " " + e : "C" + a + " " + m + " " + c + " " + m + " " + c + " " + e;
  }
  return d;
}
function mark(item, element) {
  (marks[item] = marks[item] || []).push(element);
}
// Draw a view.
function show(n) {
  number = n;
  view = DATA[n];
  marks = [];
  picked = -1;
  world.replaceChildren();
  $("views").value = n;
  plan.setAttribute("aria-label", view.title);
  const edges = make("g", {}, world);
  for (const [item, points] of view.edges) {
    const d = route(points);
    mark(item, make("path", { class: "e", d }, edges));
    make("path", { class: "eh", d, "data-item": item }, edges);
  }
  for (const b of view.boxes) {
    const [left, top, w, h] = b.at,
      g = make("g", { class: "b", transform: "translate(" + left + " " + top + ")", "data-item": b.item }, world);
    make("rect", { class: "f", width: w, height: h, rx: 5 }, g);
    make(
      "path",
      {
        d:
          "M0 5a5 5 0 0 1 5-5H" +
          (w - 5) +
          "a5 5 0 0 1 5 5V" +
          (b.lines.length ? 20 : h - 5) +
          (b.lines.length ? "H0Z" : "a5 5 0 0 1-5 5H5a5 5 0 0 1-5-5Z"),
        fill: b.colour,
      },
      g,
    );
    make("text", { class: "h", x: 9, y: 14.5 }, g, b.title);
    b.lines.forEach(([text, css, item], i) => {
      const line = 20 + 13.5 + 17 * i,
        dot = css == "in" || css == "copied";
      if (dot) make("circle", { class: "dot " + css, cx: 12, cy: line - 3.5, r: 3.2 }, g);
      mark(item, make("text", { class: css, x: dot ? 20 : 9, y: line, "data-item": item }, g, text));
    });
    mark(b.item, g);
  }
  const facts = $("facts");
  facts.replaceChildren();
  for (const [name, text] of view.facts) {
    const s = html("span", facts);
    html("i", s, name + " ");
    s.append(text);
    s.title = text;
  }
  const legend = $("legend");
  legend.replaceChildren();
  for (const [name, colour] of view.legend) {
    const s = html("span", legend);
    html("i", s).style.background = colour;
    s.append(name);
  }
  for (const [name, css] of [
    ["in place", "in"],
    ["copied", "copied"],
  ])
    if (view.boxes.some((b) => b.lines.some((l) => l[1] == css))) {
      const s = html("span", legend);
      html("i", s).style.cssText = "border-radius:50%;background:" + (css == "in" ? "#2a9d6f" : "#e08a1e");
      s.append("constant " + name);
    }
  detail(-1);
  list();
  start();
}
// All of it if that can be read, else its beginning.
function start() {
  const r = plan.getBoundingClientRect(),
    [w, h] = view.size,
    all = Math.min((r.width - 60) / w, (r.height - 60) / h, 1.4);
  if (all >= 0.7) fit();
  else {
    k = Math.max(0.7, Math.min(1, (r.width - 60) / w));
    x = r.width / 2 - (k * w) / 2;
    y = 30;
    if (view.boxes.length && k * w > r.width) {
      const b = view.boxes[0].at;
      x = r.width / 2 - k * (b[0] + b[2] / 2);
    }
    move();
  }
}
function fit() {
  const r = plan.getBoundingClientRect(),
    [w, h] = view.size;
  k = Math.min((r.width - 60) / (w || 1), (r.height - 60) / (h || 1), 1.4);
  x = r.width / 2 - (k * w) / 2;
  y = r.height / 2 - (k * h) / 2;
  move();
}
function move() {
  world.setAttribute("transform", "translate(" + x + " " + y + ") scale(" + k + ")");
  overview();
}
function scale() {
  return Math.min((map.width - 12) / (view.size[0] || 1), (map.height - 12) / (view.size[1] || 1));
}
// The small map with what is in sight.
function overview() {
  const c = map.getContext("2d"),
    s = scale(),
    r = plan.getBoundingClientRect();
  c.clearRect(0, 0, map.width, map.height);
  c.save();
  c.translate((map.width - s * view.size[0]) / 2, (map.height - s * view.size[1]) / 2);
  for (const b of view.boxes) {
    c.fillStyle = b.colour;
    c.fillRect(b.at[0] * s, b.at[1] * s, Math.max(b.at[2] * s, 2), Math.max(b.at[3] * s * 0.8, 0.7));
  }
  c.strokeStyle = "#d0342c";
  c.lineWidth = 1.5;
  c.strokeRect((-x / k) * s, (-y / k) * s, (r.width / k) * s, (r.height / k) * s);
  c.restore();
}
// Closer or farther; the point under the pointer stays where it is.
function zoom(f, px, py) {
  const r = plan.getBoundingClientRect();
  px = px === undefined ? r.width / 2 : px;
  py = py === undefined ? r.height / 2 : py;
  const n = Math.min(4, Math.max(0.01, k * f));
  x = px - ((px - x) * n) / k;
  y = py - ((py - y) * n) / k;
  k = n;
  move();
}
// The box of an item; of a value or constant inside the graph, the box of a neighbour.
function boxOf(item) {
  return (
    view.boxes.find((b) => b.item == item) ||
    view.boxes.find((b) => b.lines.some((l) => l[2] == item)) ||
    view.boxes.find((b) => view.items[item][3].some((row) => row[2].includes(b.item))) ||
    view.boxes.find((b) => b.lines.some((l) => view.items[item][3].some((row) => row[2].includes(l[2]))))
  );
}
// Choose an item, and go there if asked to.
function pick(item, go) {
  for (const e of marks[picked] || []) e.classList.remove("on");
  picked = item;
  for (const e of marks[item] || []) e.classList.add("on");
  detail(item);
  if (item >= 0) {
    history.replaceState(null, "", "#" + number + "." + item);
    if (go) {
      const b = boxOf(item);
      if (b) {
        const r = plan.getBoundingClientRect();
        k = Math.max(k, 0.8);
        x = r.width / 2 - k * (b.at[0] + b.at[2] / 2);
        y = r.height / 2 - k * (b.at[1] + b.at[3] / 2);
        move();
      }
    }
  }
  for (const li of found.children) li.classList.toggle("on", +li.dataset.item == item);
}
// What there is to say of an item, or of the whole view.
function detail(item) {
  const t = document.querySelector("#detail table"),
    h = document.querySelector("#detail h2");
  t.replaceChildren();
  const row = (name, text, targets) => {
    const r = html("tr", t);
    html("td", r, name);
    const d = html("td", r);
    if (targets.length) {
      const a = html("a", d, text);
      a.onclick = () => pick(targets[0], true);
    } else d.textContent = text;
  };
  if (item < 0) {
    h.textContent = view.title;
    for (const [name, text] of view.facts) row(name, text, []);
    for (const note of view.notes) row("note", note, []);
    return;
  }
  const [kind, name, , rows] = view.items[item];
  h.textContent = kind + " " + name.replace(new RegExp("^" + kind + " "), "");
  if (item in view.doors) {
    const r = html("tr", t);
    html("td", r, "graph");
    const a = html("a", html("td", r), DATA[view.doors[item]].title);
    a.onclick = () => show(view.doors[item]);
  }
  for (const [what, text, targets] of rows) row(what, text, targets);
}
// Items that hold all words of the search, those with the words in their names first.
function list() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  found.replaceChildren();
  hits = [];
  at = -1;
  view.items.forEach((it, i) => {
    const text = (
      it[0] +
      " " +
      it[1] +
      " " +
      it[2] +
      " " +
      it[3].map((r) => r[0] + " " + r[1]).join(" ")
    ).toLowerCase();
    const name = (it[0] + " " + it[1]).toLowerCase();
    if (words.every((w) => text.includes(w)))
      hits.push([(words.every((w) => name.includes(w)) ? 0 : 4) + ({ value: 1, constant: 2 }[it[0]] || 0), i]);
  });
  hits.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  hits = hits.map((h) => h[1]);
  $("count").textContent =
    hits.length + " of " + view.items.length + (hits.length > 300 ? ", the first 300 shown" : "");
  for (const i of hits.slice(0, 300)) {
    const li = html("li", found, view.items[i][1]);
    li.dataset.item = i;
    html("small", li, view.items[i][0]);
  }
  const lit = new Set(words.length ? hits : []);
  for (const g of world.querySelectorAll(".b")) g.classList.toggle("hit", lit.has(+g.dataset.item));
}
// The next or the last item that was found.
function step(d) {
  if (!hits.length) return;
  at = (at + d + hits.length) % hits.length;
  pick(hits[at], true);
  const li = found.children[at];
  if (li) li.scrollIntoView({ block: "nearest" });
}
search.addEventListener("input", list);
search.addEventListener("keydown", (e) => {
  if (e.key == "Enter" || e.key == "ArrowDown") {
    step(e.shiftKey ? -1 : 1);
    e.preventDefault();
  } else if (e.key == "ArrowUp") {
    step(-1);
    e.preventDefault();
  } else if (e.key == "Escape") {
    search.value = "";
    list();
    search.blur();
  }
});
found.addEventListener("click", (e) => {
  const li = e.target.closest("li");
  if (li) {
    at = hits.indexOf(+li.dataset.item);
    pick(+li.dataset.item, true);
  }
});
document.addEventListener("keydown", (e) => {
  if (e.target == search || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key == "/") {
    search.focus();
    e.preventDefault();
  } else if (e.key == "+") zoom(1.25);
  else if (e.key == "-") zoom(0.8);
  else if (e.key == "0") fit();
});
let drag = null;
plan.addEventListener("pointerdown", (e) => {
  drag = [e.clientX, e.clientY, x, y, false];
  plan.setPointerCapture(e.pointerId);
});
plan.addEventListener("pointermove", (e) => {
  if (!drag) return;
  const dx = e.clientX - drag[0],
    dy = e.clientY - drag[1];
  if (Math.abs(dx) + Math.abs(dy) > 4) {
    drag[4] = true;
    plan.classList.add("drag");
  }
  if (drag[4]) {
    x = drag[2] + dx;
    y = drag[3] + dy;
    move();
  }
});
plan.addEventListener("pointerup", (e) => {
  plan.classList.remove("drag");
  const moved = drag && drag[4];
  drag = null;
  if (moved) return;
  const under = document.elementFromPoint(e.clientX, e.clientY),
    t = under && under.closest("[data-item]");
  if (t && under.classList.contains("door")) {
    show(view.doors[+t.dataset.item]);
    return;
  }
  pick(t ? +t.dataset.item : -1);
});
plan.addEventListener("dblclick", (e) => {
  const t = document.elementFromPoint(e.clientX, e.clientY).closest(".b");
  if (t && t.dataset.item in view.doors) show(view.doors[t.dataset.item]);
});
plan.addEventListener(
  "wheel",
  (e) => {
    e.preventDefault();
    const r = plan.getBoundingClientRect();
    if (e.ctrlKey || !e.shiftKey)
      zoom(Math.exp(-e.deltaY * (e.deltaMode ? 0.05 : 0.0016)), e.clientX - r.left, e.clientY - r.top);
    else {
      x -= e.deltaY + e.deltaX;
      move();
    }
  },
  { passive: false },
);
// To the place that was pointed at on the map.
function jump(e) {
  if (!(e.buttons & 1)) return;
  const m = map.getBoundingClientRect(),
    s = scale(),
    r = plan.getBoundingClientRect();
  const px = (e.clientX - m.left - (map.width - s * view.size[0]) / 2) / s,
    py = (e.clientY - m.top - (map.height - s * view.size[1]) / 2) / s;
  x = r.width / 2 - k * px;
  y = r.height / 2 - k * py;
  move();
}
map.addEventListener("pointerdown", jump);
map.addEventListener("pointermove", jump);
$("in").onclick = () => zoom(1.25);
$("out").onclick = () => zoom(0.8);
$("fit").onclick = fit;
$("views").onchange = (e) => show(+e.target.value);
addEventListener("resize", overview);
DATA.forEach((v, i) => {
  const o = html("option", $("views"), v.title);
  o.value = i;
});
const place = /^#(\d+)\.(\d+)$/.exec(location.hash);
show(place && +place[1] < DATA.length ? +place[1] : 0);
if (place && +place[2] < view.items.length) pick(+place[2], true);
document.documentElement.dataset.ready = view.boxes.length;
