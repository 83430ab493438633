// The c10 allocators of device and pinned memory. A storage has a fake address, a block of the caching allocator and a
// shadow, which holds the values that are known.
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>

#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "allocator_settings.h"
#include "device.h"
#include "values.h"

namespace maya {
namespace {

thread_local bool temporary = false;

void release(void* context) {
  auto* allocation = static_cast<Allocation*>(context);
  auto* block = allocation->block;
  if (is_current(allocation->allocator))  // not a leftover of an emulation that has ended
    recorder().add(EventKind::Free, allocation->device, stream_of(block), 0, address_of(block), size_of(block),
                   temporary ? kTemporary : 0);
  allocation->allocator->free(block);
  delete allocation;
}
void release_nothing(void*) {}

thread_local std::optional<uint32_t> allocating_as;  // the category of what this thread allocates, if it is known

// ---- the device without a memory limit, for work done aside ----
constexpr int64_t kEndless = int64_t(1) << 50;
CachingAllocator& beside(int device) {
  static auto* made = new std::map<int, std::unique_ptr<CachingAllocator>>;  // its blocks may outlive the emulation
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& one = (*made)[device];
  if (!one) one = std::make_unique<CachingAllocator>(device, kEndless, 0, parse_allocator_settings(""));
  return *one;
}

using c10::CachingDeviceAllocator::DeviceStats;

void fill(c10::CachingAllocator::StatArray& to, const PoolStats& from) {
  for (size_t pool = 0; pool < from.size(); pool++) {
    to[pool].current = from[pool].current;
    to[pool].peak = from[pool].peak;
    to[pool].allocated = from[pool].allocated;
    to[pool].freed = from[pool].freed;
  }
}

struct StorageAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(c10::DeviceType::CUDA, device);
    if (bytes == 0) return {nullptr, nullptr, &release_nothing, where};
    auto& memory = aside() ? beside(device) : maya::allocator(device);
    Block* block = nullptr;
    try {
      block = memory.allocate(bytes, current_stream(device));
    } catch (const OutOfMemory& error) {
      recorder().add(EventKind::OutOfMemory, device, current_stream(device), 0, bytes);
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
    recorder().add(EventKind::Alloc, device, stream_of(block), 0, address_of(block), size_of(block),
                   temporary ? kTemporary : 0);
    if (allocating_as) recorder().add(EventKind::Label, device, stream_of(block), *allocating_as, address_of(block));
    return {reinterpret_cast<void*>(address_of(block)), new Allocation{block, &memory, device, {}}, &release, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool) override {
    for (int device = 0; device < config().count; device++)
      maya::allocator(device).empty_cache({pool.first, pool.second});
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (auto* allocation = allocation_of(pointer)) allocation->allocator->record_stream(allocation->block, stream.id());
  }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const AllocatorStats from = maya::allocator(device).stats();
    DeviceStats to;
    fill(to.allocation, from.allocation);
    fill(to.segment, from.segment);
    fill(to.active, from.active);
    fill(to.inactive_split, from.inactive_split);
    fill(to.allocated_bytes, from.allocated_bytes);
    fill(to.reserved_bytes, from.reserved_bytes);
    fill(to.active_bytes, from.active_bytes);
    fill(to.inactive_split_bytes, from.inactive_split_bytes);
    fill(to.requested_bytes, from.requested_bytes);
    to.num_alloc_retries = from.num_alloc_retries;
    to.num_ooms = from.num_ooms;
    return to;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { maya::allocator(device).reset_accumulated_stats(); }
  void resetPeakStats(c10::DeviceIndex device) override { maya::allocator(device).reset_peak_stats(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return maya::allocator(device).memory_info();
  }
};

// Pinned memory is ordinary host memory that is remembered as pinned.
struct PinnedAllocator final : c10::Allocator {
  struct Pinned {
    c10::DataPtr memory;
    PinnedAllocator* owner;
  };
  std::mutex mutex;
  std::map<const char*, size_t> live;

  c10::DataPtr allocate(size_t bytes) override {
    auto* pinned = new Pinned{c10::GetCPUAllocator()->allocate(bytes), this};
    void* start = pinned->memory.get();
    if (start) {
      std::lock_guard lock(mutex);
      live[static_cast<const char*>(start)] = bytes;
    }
    return {start, pinned, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  static void unpin(void* context) {
    auto* pinned = static_cast<Pinned*>(context);
    {
      std::lock_guard lock(pinned->owner->mutex);
      pinned->owner->live.erase(static_cast<const char*>(pinned->memory.get()));
    }
    delete pinned;
  }
  bool contains(const void* pointer) {
    std::lock_guard lock(mutex);
    auto next = live.upper_bound(static_cast<const char*>(pointer));
    if (next == live.begin()) return false;
    auto [start, bytes] = *std::prev(next);
    return static_cast<const char*>(pointer) < start + bytes;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// Storages may outlive the emulation that made them, so neither of these is ever destroyed.
StorageAllocator& storages() {
  static auto* instance = new StorageAllocator;
  return *instance;
}
PinnedAllocator& pinned() {
  static auto* instance = new PinnedAllocator;
  return *instance;
}

struct BlasWorkspaces {
  std::mutex mutex;
  std::map<std::tuple<BlasLibrary, uint64_t, int, c10::StreamId>, c10::DataPtr> live;  // by handle, device, stream
  std::map<int, std::vector<uint64_t>> idle_handles;  // by device, of threads that ended
  uint64_t made = 0;
};
BlasWorkspaces& blas() {
  static auto* instance = new BlasWorkspaces;
  return *instance;
}

// As in ATen's pool, a thread takes an idle handle or creates one, and returns it when it ends.
struct ThreadHandles {
  std::map<int, uint64_t> by_device;
  uint64_t get(int device) {
    auto [found, inserted] = by_device.try_emplace(device, 0);
    if (inserted) {
      auto& idle = blas().idle_handles[device];
      if (idle.empty()) found->second = ++blas().made;
      else {
        found->second = idle.back();
        idle.pop_back();
      }
    }
    return found->second;
  }
  ~ThreadHandles() {
    std::lock_guard lock(blas().mutex);
    for (auto [device, handle] : by_device) blas().idle_handles[device].push_back(handle);
  }
};
thread_local ThreadHandles thread_handles;

}  // namespace

c10::Allocator* device_allocator() { return &storages(); }
c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* pointer) { return pinned().contains(pointer); }

Allocation* allocation_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &release ? static_cast<Allocation*>(pointer.get_context()) : nullptr;
}

Allocation* allocation_of(const c10::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  return allocation_of(tensor->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks());
}

at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides, &storages(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

void resize_storage(c10::StorageImpl* storage, int64_t bytes) {
  OnDevice on(storage->device().index());
  auto fresh = storages().allocate(bytes);
  auto* from = allocation_of(storage->_mutable_data_ptr_no_checks());
  auto* to = allocation_of(fresh);
  const int64_t had = storage->nbytes();
  if (to) to->shadow = resized(from ? std::move(from->shadow) : Shadow{Shadow::Fresh}, had, bytes);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

void free_and_forget_memory(c10::StorageImpl* storage) {
  auto& pointer = storage->_mutable_data_ptr_no_checks();
  if (!allocation_of(pointer)) return;
  release(pointer.release_context());
}

void ensure_blas_workspace(BlasLibrary library, int64_t bytes) {
  if (aside()) return;
  const int device = current_device();
  std::lock_guard lock(blas().mutex);
  auto key = std::tuple(library, thread_handles.get(device), device, current_stream(device));
  auto [workspace, inserted] = blas().live.try_emplace(key);
  if (!inserted) return;
  try {
    workspace->second = storages().allocate(bytes);
  } catch (...) {
    blas().live.erase(workspace);
    throw;
  }
  recorder().add(EventKind::Label, device, current_stream(device), uint32_t(Category::Workspace),
                 reinterpret_cast<int64_t>(workspace->second.get()));
}

void clear_blas_workspaces() {
  std::lock_guard lock(blas().mutex);
  blas().live.clear();
}

AsTemporary::AsTemporary() { temporary = true; }
AsTemporary::~AsTemporary() { temporary = false; }

std::optional<uint32_t> allocate_as(std::optional<uint32_t> category) { return std::exchange(allocating_as, category); }

}  // namespace maya
