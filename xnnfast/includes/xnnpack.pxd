# Declarations of xnnpack.h at the pin (vendor/XNNPACK/PIN) that the runtime calls itself: types, lifecycle,
# values, profiling, weights cache. The calls that define nodes are declared in _generated/lower.pxi, which
# the build checks against the header.

from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t, uint16_t


cdef extern from "stdbool.h" nogil:
    ctypedef bint c_bool "bool"


cdef extern from "pthreadpool.h" nogil:
    ctypedef struct pthreadpool:
        pass
    ctypedef pthreadpool* pthreadpool_t
    pthreadpool_t pthreadpool_create(size_t threads_count)
    size_t pthreadpool_get_threads_count(pthreadpool_t pool)
    void pthreadpool_destroy(pthreadpool_t pool)


cdef extern from "xnnpack.h" nogil:
    enum: XNN_INVALID_VALUE_ID

    ctypedef enum xnn_status "enum xnn_status":
        xnn_status_success
        xnn_status_uninitialized
        xnn_status_invalid_parameter
        xnn_status_invalid_state
        xnn_status_unsupported_parameter
        xnn_status_unsupported_hardware
        xnn_status_out_of_memory
        xnn_status_reallocation_required

    ctypedef enum xnn_datatype "enum xnn_datatype":
        xnn_datatype_fp32
        xnn_datatype_fp16
        xnn_datatype_bf16
        xnn_datatype_int32
        xnn_datatype_qint8
        xnn_datatype_quint8
        xnn_datatype_qint32
        xnn_datatype_qcint8
        xnn_datatype_qcint32
        xnn_datatype_qcint4
        xnn_datatype_qbint4
        xnn_datatype_qdint8

    ctypedef enum xnn_profile_info "enum xnn_profile_info":
        xnn_profile_info_num_operators
        xnn_profile_info_operator_name
        xnn_profile_info_operator_timing

    ctypedef struct xnn_allocator "struct xnn_allocator":
        pass
    ctypedef struct xnn_subgraph "struct xnn_subgraph":
        pass
    ctypedef xnn_subgraph* xnn_subgraph_t
    ctypedef struct xnn_runtime "struct xnn_runtime":
        pass
    ctypedef xnn_runtime* xnn_runtime_t
    ctypedef struct xnn_workspace "struct xnn_workspace":
        pass
    ctypedef xnn_workspace* xnn_workspace_t

    ctypedef struct xnn_external_value "struct xnn_external_value":
        uint32_t id
        void* data

    ctypedef struct xnn_weights_cache_look_up_key "struct xnn_weights_cache_look_up_key":
        uint32_t seed
        const void* kernel
        const void* bias

    ctypedef struct xnn_weights_cache_provider "struct xnn_weights_cache_provider":
        void* context
        size_t (*look_up)(void* context, const xnn_weights_cache_look_up_key* key) noexcept
        void* (*reserve_space)(void* context, size_t n) noexcept
        size_t (*look_up_or_insert)(
            void* context, const xnn_weights_cache_look_up_key* key, void* ptr, size_t size) noexcept
        c_bool (*is_finalized)(void* context) noexcept
        void* (*offset_to_addr)(void* context, size_t offset) noexcept
        xnn_status (*delete_cache)(void* context) noexcept
    ctypedef xnn_weights_cache_provider* xnn_weights_cache_t

    xnn_status xnn_initialize(const xnn_allocator* allocator)
    xnn_status xnn_create_subgraph(uint32_t external_value_ids, uint32_t flags, xnn_subgraph_t* subgraph_out)
    xnn_status xnn_delete_subgraph(xnn_subgraph_t subgraph)

    xnn_status xnn_define_tensor_value(
        xnn_subgraph_t subgraph, xnn_datatype datatype, size_t num_dims, const size_t* dims, const void* data,
        uint32_t external_id, uint32_t flags, uint32_t* id_out)
    xnn_status xnn_define_quantized_tensor_value(
        xnn_subgraph_t subgraph, xnn_datatype datatype, int32_t zero_point, float scale, size_t num_dims,
        const size_t* dims, const void* data, uint32_t external_id, uint32_t flags, uint32_t* id_out)
    xnn_status xnn_define_channelwise_quantized_tensor_value_v2(
        xnn_subgraph_t subgraph, xnn_datatype datatype, int32_t zero_point, const float* scale, size_t num_dims,
        size_t channel_dim, const size_t* dims, const void* data, uint32_t external_id, uint32_t flags,
        uint32_t* id_out)
    xnn_status xnn_define_blockwise_quantized_tensor_value(
        xnn_subgraph_t subgraph, xnn_datatype datatype, int32_t zero_point, const uint16_t* scale, size_t num_dims,
        size_t channel_dim, size_t block_size, const size_t* dims, const void* data, uint32_t external_id,
        uint32_t flags, uint32_t* id_out)
    xnn_status xnn_define_dynamically_quantized_tensor_value(
        xnn_subgraph_t subgraph, xnn_datatype datatype, size_t num_dims, size_t num_nonbatch_dims,
        const size_t* dims, uint32_t external_id, uint32_t flags, uint32_t* id_out)

    xnn_status xnn_create_workspace(xnn_workspace_t* workspace_out)
    xnn_status xnn_release_workspace(xnn_workspace_t workspace)
    xnn_status xnn_create_runtime_v4(
        xnn_subgraph_t subgraph, xnn_weights_cache_t weights_cache, xnn_workspace_t workspace,
        pthreadpool_t threadpool, uint32_t flags, xnn_runtime_t* runtime_out)
    xnn_status xnn_delete_runtime(xnn_runtime_t runtime)
    xnn_status xnn_reshape_external_value(
        xnn_runtime_t runtime, uint32_t external_id, size_t num_dims, const size_t* dims)
    xnn_status xnn_reshape_runtime(xnn_runtime_t runtime)
    xnn_status xnn_get_external_value_shape(
        xnn_runtime_t runtime, uint32_t external_id, size_t* num_dims, size_t* dims)
    xnn_status xnn_setup_runtime_v2(
        xnn_runtime_t runtime, size_t num_external_values, const xnn_external_value* external_values)
    xnn_status xnn_invoke_runtime(xnn_runtime_t runtime)
    xnn_status xnn_get_runtime_profiling_info(
        xnn_runtime_t runtime, xnn_profile_info param_name, size_t param_value_size, void* param_value,
        size_t* param_value_size_ret)
