// Decides which kernel scaled_dot_product_attention runs. The order of preference and the constraints are those of
// ATen's sdp_utils.cpp for CUDA (torch 2.13); the checks shared with the CPU come from its header.
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include <array>
#include <cstdlib>

#include "device.h"
#include "dispatch.h"
#include "kernels.h"

namespace maya {
namespace {

using sdp::sdp_params;
using sdp::SDPBackend;
using Check = bool (*)(const sdp_params&, bool);

int sm() { return config().major * 10 + config().minor; }
bool is(const at::Tensor& tensor, at::ScalarType dtype) { return tensor.scalar_type() == dtype; }
bool is_half(const sdp_params& params) { return is(params.query, at::kHalf) || is(params.query, at::kBFloat16); }

bool same_dtype(const sdp_params& params, const std::vector<at::ScalarType>& allowed) {
  const auto dtype = params.query.scalar_type();
  if (params.key.scalar_type() != dtype || params.value.scalar_type() != dtype) return false;
  return std::find(allowed.begin(), allowed.end(), dtype) != allowed.end();
}
bool low_precision(const sdp_params& params) {
  return sm() >= 80 ? same_dtype(params, {at::kHalf, at::kBFloat16}) : same_dtype(params, {at::kHalf});
}
template <size_t N>
bool all(const std::array<Check, N>& checks, const sdp_params& params) {
  for (auto check : checks)
    if (!check(params, false)) return false;
  return true;
}

bool can_use_flash(const sdp_params& params) {
  if (!all(std::array<Check, 3>{sdp::check_runtime_disabled_flash, sdp::check_tensor_shapes, sdp::check_for_attn_mask},
           params))
    return false;
  // Symbolic under torch.compile: reading size() would turn all symbols into constants.
  const c10::SymInt head = params.query.sym_size(-1);
  if (params.key.sym_size(-1) != head || params.value.sym_size(-1) != head || head > 256) return false;
  if (sm() < 80 || sm() > 121) return false;
  const bool small_shared_memory = (sm() >= 86 && sm() <= 89) || sm() >= 120;
  if (small_shared_memory && sdp::input_requires_grad(params) &&
      !(head <= 192 || (params.dropout == 0.0 && head > 224)))
    return false;
  if (params.is_causal && params.query.sym_size(-2) != params.key.sym_size(-2)) return false;
  return low_precision(params) && all(std::array<Check, 3>{sdp::check_batch_size_and_num_heads_dense<true>,
                                                           sdp::check_nonzero_sequence_lengths_dense,
                                                           sdp::check_last_dim_stride_equals_1_dense<true>},
                                      params);
}

bool can_use_efficient(const sdp_params& params) {
  if (!all(std::array<Check, 2>{sdp::check_runtime_disabled_mem_efficient, sdp::check_tensor_shapes}, params))
    return false;
  if (sm() < 50 || sm() > 121) return false;
  const bool tensor_cores = sm() >= 80 || (sm() >= 70 && is_half(params));
  int64_t alignment = sm() >= 80 ? 4 : 1;
  if (tensor_cores) alignment = std::max<int64_t>(alignment, 128 / (is_half(params) ? 16 : 32));
  const c10::SymInt head = params.query.sym_size(-1), value_head = params.value.sym_size(-1);
  if (params.key.sym_size(-1) != head || head % alignment != 0 || head <= 0 || value_head % alignment != 0 ||
      value_head <= 0)
    return false;
  if (!all(std::array<Check, 3>{sdp::check_nonzero_sequence_lengths_dense,
                                sdp::check_last_dim_stride_equals_1_dense<false>,
                                sdp::check_batch_size_and_num_heads_dense<false>},
           params))
    return false;
  return sm() >= 80 ? same_dtype(params, {at::kHalf, at::kFloat, at::kBFloat16})
                    : same_dtype(params, {at::kHalf, at::kFloat});
}

bool can_use_cudnn(const sdp_params& params) {
  auto& context = at::globalContext();
  if (!context.userEnabledCuDNNSDP() || sm() < 80 || sm() > 121) return false;
  if (context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly()) return false;
  if (!sdp::check_tensor_shapes(params, false) || !low_precision(params) || !sdp::check_attn_mask_shape(params, false))
    return false;
  if (params.dropout * 16.0 != std::floor(params.dropout * 16.0)) return false;
  if (!all(std::array<Check, 3>{sdp::check_nonzero_sequence_lengths_dense,
                                sdp::check_last_dim_stride_equals_1_dense<true>,
                                sdp::check_batch_size_and_num_heads_dense<true, false>},
           params))
    return false;
  const c10::SymInt head = params.query.sym_size(3), value_head = params.value.sym_size(3);
  int64_t limit = sm() == 90 ? 256 : 128;
  if (config().major == 10 && head == 192 && value_head == 128) limit = 192;
  if (head > limit || value_head > limit || head % 8 != 0 || value_head % 8 != 0) return false;
  if (params.key.sym_size(2) == 1 || (params.dropout != 0.0 && params.query.sym_size(2) == 1)) return false;
  return true;
}

// torch keeps one order of preference for all devices; the emulated device's replaces it while it is installed.
std::vector<int64_t> order_before;

}  // namespace

void prefer_attention_backends() {
  auto& context = at::globalContext();
  order_before.clear();
  for (auto backend : context.sDPPriorityOrder()) order_before.push_back(int64_t(backend));
  if (config().prefer_cudnn_attention && !config().deprioritize_cudnn_attention)
    context.setSDPPriorityOrder({int64_t(SDPBackend::cudnn_attention), int64_t(SDPBackend::flash_attention),
                                 int64_t(SDPBackend::efficient_attention), int64_t(SDPBackend::math)});
}

void restore_attention_backends() { at::globalContext().setSDPPriorityOrder(order_before); }

namespace {
SDPBackend chosen(const sdp_params& params) {
  for (auto backend : at::globalContext().sDPPriorityOrder()) {
    switch (backend) {
      case SDPBackend::cudnn_attention:
        if (can_use_cudnn(params)) return backend;
        break;
      case SDPBackend::flash_attention:
        if (can_use_flash(params)) return backend;
        break;
      case SDPBackend::efficient_attention:
        if (can_use_efficient(params)) return backend;
        break;
      case SDPBackend::math:
        if (at::globalContext().userEnabledMathSDP()) return backend;
        break;
      default: break;
    }
  }
  TORCH_CHECK(false, "No available kernel. Aborting execution.");
}
// Tensors of a compiler have sizes, too, unless these are symbols.
bool has_sizes(const at::Tensor& tensor) {
  return tensor.is_cuda() && !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}
}  // namespace

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
                         bool enable_gqa) {
  // In training, ATen runs no fused attention on strided nested tensors. For inference it may; here that is counted as
  // made of other ops, too.
  if (query.is_nested() && query.layout() == at::kStrided) return int64_t(SDPBackend::math);
  const int64_t backend = int64_t(chosen({query, key, value, mask, dropout, is_causal, enable_gqa}));
  // Noted so that it can be found out later whether another GPU would choose another kernel.
  if (has_sizes(query) && has_sizes(key) && has_sizes(value) && (!mask || has_sizes(*mask)))
    note_call("maya::attention_choice",
              {query, key, value, mask ? c10::IValue(*mask) : c10::IValue(), dropout, is_causal, enable_gqa, backend});
  return backend;
}

}  // namespace maya
