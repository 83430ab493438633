#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty_like.h>

#include <mutex>
#include <utility>
#include <vector>

#include "device.h"
#include "dispatch.h"
#include "values.h"

namespace maya {
namespace {

using at::Tensor;
using c10::IntArrayRef;

int device_index(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}
at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

Tensor empty(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device_index(device));
  Tensor made(at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                        or_default(dtype), format));
  mark_fresh(made);
  return made;
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  OnDevice on(device_index(device));
  Tensor made = new_tensor(sizes, strides, or_default(dtype));
  mark_fresh(made);
  return made;
}

// A copy between host and device is a plain memcpy only if both sides have the same layout in memory.
bool needs_staging(const Tensor& to, const Tensor& from) {
  if (to.scalar_type() != from.scalar_type() || to.is_conj() != from.is_conj() || to.is_neg() != from.is_neg())
    return true;
  if (to.sizes() != from.sizes()) return true;
  if (to.is_contiguous() && from.is_contiguous()) return false;  // strides may still differ where a size is 1
  return to.strides() != from.strides() || !to.is_non_overlapping_and_dense();
}

std::mutex pageable_lock;
std::vector<std::pair<int64_t, int64_t>> pageable;

// CUDA stages copies of more than 64 KiB through pinned memory of its own, unless the program's memory is pinned.
void note_host_copy(const Tensor& host) {
  const auto bytes = int64_t(host.nbytes());
  if (!recorder().on() || bytes <= 64 * 1024 || is_pinned(host.storage().data())) return;
  std::lock_guard lock(pageable_lock);
  pageable.emplace_back(int64_t(recorder().size()), bytes);
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0 || to.is_same(from)) return to;
  const bool on_device = to.is_cuda() && from.is_cuda();
  OnDevice on(on_device || !to.is_cuda() ? from.device().index() : to.device().index());
  if (on_device) {
    record_call("aten::copy_", {to, from}, {});
    copy_value(to, from.sizes() == to.sizes() ? from : from.expand(to.sizes()));
    return to;
  }
  if (needs_staging(to, from)) {  // as in ATen: convert and pack on the source's side, copy, unpack on the target's
    Tensor target = to.is_contiguous() ? to : at::empty_like(to, at::MemoryFormat::Contiguous);
    Tensor source = from.to(to.scalar_type()).expand_as(to).contiguous();
    target.copy_(source, non_blocking);
    if (!target.is_same(to)) to.copy_(target, non_blocking);
    return to;
  }
  note_host_copy(to.is_cuda() ? from : to);
  record_call("aten::copy_", {to, from}, {});
  if (!non_blocking) synchronize_stream(current_device(), current_stream(current_device()));
  if (to.is_cuda()) copy_value(to, from);
  else read_to_host(to, from);
  return to;
}

Tensor& fill_(Tensor& self, const at::Scalar& value) {
  if (self.numel() == 0) return self;
  OnDevice on(self.device().index());
  record_call("aten::fill_.Scalar", {self, value}, {});
  remember_uniform(self, value);
  return self;
}
Tensor& zero_(Tensor& self) {
  if (self.numel() == 0) return self;
  OnDevice on(self.device().index());
  record_call("aten::zero_", {self}, {});
  remember_uniform(self, 0);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  OnDevice on(self.device().index());
  record_call("aten::_local_scalar_dense", {self}, {});
  synchronize_stream(current_device(), current_stream(current_device()));
  return read_item(self);
}

bool equal(const Tensor& self, const Tensor& other) {
  if (self.sizes() != other.sizes()) return false;
  OnDevice on(self.device().index());
  record_call("aten::equal", {self, other}, {});
  synchronize_stream(current_device(), current_stream(current_device()));
  return has_equal_value(self, other);
}

void record_stream(Tensor& self, c10::Stream stream) {
  if (auto* allocation = allocation_of(self.unsafeGetTensorImpl()))
    allocation->allocator->record_stream(allocation->block, stream.id());
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    tensor->set_sizes_contiguous(sizes);
    const auto need = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(), self.storage_offset());
    auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
    if (storage->nbytes() < need) resize_storage(storage, need);
  }
  if (format) tensor->empty_tensor_restride(*format);
  return self;
}

Tensor& set_from(Tensor& self, c10::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(storage));
  const auto packed = c10::contiguous_strides(sizes);
  tensor->set_sizes_and_strides(sizes, strides.size() == sizes.size() ? strides : IntArrayRef(packed), offset);
  const auto need =
      at::detail::computeStorageNbytes(tensor->sizes(), tensor->strides(), self.dtype().itemsize(), offset);
  auto* memory = tensor->unsafe_storage().unsafeGetStorageImpl();
  if (memory->nbytes() < need) resize_storage(memory, need);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const int64_t elements = storage.nbytes() / self.dtype().itemsize();
  return set_from(self, std::move(storage), 0, {elements}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& from) {
  return set_from(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
Tensor& set_nothing(Tensor& self) {
  OnDevice on(self.device().index());
  return set_from(self, new_tensor({0}, {1}, self.scalar_type()).storage(), 0, {0}, {1});
}

torch_abi::ReplacedStubs& stubs() {
  static auto* instance = new torch_abi::ReplacedStubs;
  return *instance;
}

}  // namespace

bool copy_between_devices(const c10::IValue& to, const c10::IValue& from, bool non_blocking) {
  const auto targets = to.toTensorVector(), sources = from.toTensorVector();
  auto elsewhere = [&](const Tensor& tensor) { return tensor.device() != targets[0].device(); };
  if (targets.size() != sources.size() || targets.empty()) return false;
  if (std::none_of(targets.begin(), targets.end(), elsewhere) &&
      std::none_of(sources.begin(), sources.end(), elsewhere))
    return false;
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i], non_blocking);
  return true;
}

std::unordered_set<std::string> register_handwritten_kernels(torch::Library& aten) {
  std::unordered_set<std::string> names;
#define BY_HAND(name, function) \
  aten.impl(name, function);    \
  names.insert(name)
  BY_HAND("empty.memory_format", &empty);
  BY_HAND("empty_strided", &empty_strided);
  BY_HAND("copy_", &copy_);
  BY_HAND("fill_.Scalar", &fill_);
  BY_HAND("zero_", &zero_);
  BY_HAND("_local_scalar_dense", &local_scalar_dense);
  BY_HAND("equal", &equal);
  BY_HAND("record_stream", &record_stream);
  BY_HAND("resize_", &resize_);
  BY_HAND("set_.source_Storage_storage_offset", &set_from);
  BY_HAND("set_.source_Storage", &set_storage);
  BY_HAND("set_.source_Tensor", &set_tensor);
  BY_HAND("set_", &set_nothing);
  BY_HAND("_fused_sdp_choice", &choose_attention);
#undef BY_HAND
  stubs().set(at::native::_fused_sdp_choice_stub, &choose_attention);
  prefer_attention_backends();
  register_rnn_stubs(stubs());
  return names;
}

std::vector<std::pair<int64_t, int64_t>> take_pageable_copies() {
  std::lock_guard lock(pageable_lock);
  return std::exchange(pageable, {});
}

void restore_stubs() {
  stubs().restore();
  restore_attention_backends();
}

}  // namespace maya
