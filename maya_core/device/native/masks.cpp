// Indexing with boolean masks. On CUDA, ATen first turns masks into indices with nonzero, and assigns a single number
// with masked_fill_ instead (ATen/native/TensorAdvancedIndexing.cpp).
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/nonzero.h>

#include "kernels.h"

namespace maya {
namespace {

using c10::IValue;

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

}  // namespace

void expand_masks(const at::Tensor& self, IValue& indices) {
  bool any = false;
  for (const auto& item : indices.toListRef())
    any = any || (item.isTensor() && item.toTensor().defined() && is_mask(item.toTensor()));
  if (!any) return;
  c10::List<std::optional<at::Tensor>> expanded;
  for (const auto& item : indices.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) {
      expanded.push_back(std::optional<at::Tensor>());
      continue;
    }
    const at::Tensor& index = item.toTensor();
    if (!is_mask(index)) {
      expanded.push_back(index);
      continue;
    }
    const int64_t first = expanded.size();
    for (int64_t i = 0; i < index.dim(); i++)
      TORCH_CHECK_INDEX(first + i < self.dim() && index.size(i) == self.size(first + i), "The shape of the mask ",
                        index.sizes(), " at index ", i, " does not match the shape of the indexed tensor ",
                        self.sizes(), " at index ", first + i);
    const auto places = at::nonzero(index).to(self.device());
    for (int64_t i = 0; i < index.dim(); i++) expanded.push_back(places.select(1, i));
  }
  indices = expanded;
}

bool fill_by_mask(at::Tensor self, const IValue& indices, const at::Tensor& value) {
  if (value.numel() != 1 || !value.is_cpu()) return false;
  int64_t dims = 0;
  at::Tensor mask;
  for (const auto& item : indices.toListRef()) {
    if (!item.isTensor() || !item.toTensor().defined()) {
      dims++;
      continue;
    }
    if (mask.defined() || !is_mask(item.toTensor()) || item.toTensor().device() != self.device()) return false;
    mask = item.toTensor();
    for (int64_t i = 0; i < mask.dim(); i++)
      if (dims + i >= self.dim() || mask.size(i) != self.size(dims + i)) return false;
    dims += mask.dim();
  }
  if (!mask.defined()) return false;
  for (; dims < self.dim(); dims++) mask = mask.unsqueeze(-1);
  self.masked_fill_(mask, value.item());
  return true;
}

}  // namespace maya
