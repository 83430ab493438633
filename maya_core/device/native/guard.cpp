// Devices, streams, events and generators: the c10 device guard and the CUDA hooks of the emulated device. Installs
// them in place of torch's own, and removes them again.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>

#include <algorithm>
#include <array>
#include <map>

#include "device.h"
#include "dispatch.h"
#include "timing.h"
#include "torch_abi.h"

namespace maya {
namespace {

// Stream ids have the form of c10/cuda/CUDAStream: 0 is the default stream, an even number the pointer of an external
// one, and any other a place in one of the pools, by priority. The 33rd stream of a pool is the first one again.
constexpr int kStreamsPerPool = 32, kPriorities = 4;
bool from_pool(c10::StreamId stream) { return stream & 1; }

DeviceConfig the_config;
std::shared_ptr<const AllocatorSettings> the_settings;
bool is_installed = false;
std::vector<std::unique_ptr<CachingAllocator>> allocators;
std::vector<std::unique_ptr<CachingAllocator>> retired;  // storages of an earlier emulation may still be freed

thread_local int this_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> this_stream{};

std::array<std::array<std::atomic<uint32_t>, kPriorities>, kMaxDevices> streams_taken;
std::atomic<uint32_t> next_event{1};

struct Event {  // handles are reused, so (handle, version) identifies a record
  uint32_t handle;
  int64_t version = 0;
  c10::StreamId stream = 0;
  int device = 0;
  double time = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static int index(Device device) { return device.index() < 0 ? current_device() : device.index(); }
  static Stream stream(int device, c10::StreamId id) {
    return Stream(Stream::UNSAFE, Device(c10::DeviceType::CUDA, device), id);
  }

  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    Device before(c10::DeviceType::CUDA, current_device());
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return Device(c10::DeviceType::CUDA, current_device()); }
  void setDevice(Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  Stream getStream(Device device) const override { return stream(index(device), current_stream(index(device))); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  Stream getNewStream(Device device, int priority) const override {
    return stream(index(device), stream_from_pool(index(device), priority));
  }
  Stream exchangeStream(Stream next) const override {
    auto before = getStream(next.device());
    set_current_stream(next.device_index(), next.id());
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const MAYA_OVERRIDE_SINCE_2_11 {
    return reinterpret_cast<void*>(stream_handle(s.device_index(), s.id()));
  }
  bool isStreamCapturing(const Stream&) const MAYA_OVERRIDE_SINCE_2_12 { return capturing(); }

  void record(void** slot, const Stream& s, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*slot) *slot = new Event{next_event++};
    auto& event = *static_cast<Event*>(*slot);
    event.version++;
    event.stream = s.id();
    event.device = s.device_index();
    if (flag == c10::EventFlag::BACKEND_DEFAULT) start_timing();
    if (timing()) event.time = time_of_record(event.device, event.stream);
    recorder().add(EventKind::EventRecord, event.device, s.id(), event.handle, event.version);
  }
  void block(void* slot, const Stream& s) const override {
    if (!slot) return;
    auto& event = *static_cast<Event*>(slot);
    if (timing()) stream_waits(s.device_index(), s.id(), event.time);
    recorder().add(EventKind::EventWait, s.device_index(), s.id(), event.handle, event.version);
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* slot, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(slot); }
  void synchronizeEvent(void* slot) const override {
    if (!slot) return;
    auto& event = *static_cast<Event*>(slot);
    if (timing()) host_waits(event.time);
    recorder().add(EventKind::EventSync, event.device, event.stream, event.handle, event.version);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return elapsed_ms(reinterpret_cast<uint64_t>(from), reinterpret_cast<uint64_t>(to));
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { synchronize_stream(s.device_index(), s.id()); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& s) const override {
    if (auto* allocation = allocation_of(pointer)) allocation->allocator->record_stream(allocation->block, s.id());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return the_config.count; }
};

Guard& guard() {
  static auto* instance = new Guard;
  return *instance;
}

struct Generator final : c10::GeneratorImpl {  // the state of CUDA's Philox generator: a seed and an offset
  struct State {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  };
  std::shared_ptr<State> state = std::make_shared<State>();

  explicit Generator(int device)
      : GeneratorImpl(c10::Device(c10::DeviceType::CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { *state = {seed, 0}; }
  uint64_t current_seed() const override { return state->seed; }
  void set_offset(uint64_t offset) override { state->offset = offset; }
  uint64_t get_offset() const override { return state->offset; }
  uint64_t seed() override {
    auto fresh = c10::detail::getNonDeterministicRandom(true);
    set_current_seed(fresh);
    return fresh;
  }
  void set_state(const c10::TensorImpl& from) override {
    TORCH_CHECK(from.numel() >= 16, "RNG state is wrong size");
    memcpy(state.get(), from.data(), sizeof(State));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({16}, at::kByte, std::nullopt, std::nullopt, std::nullopt, std::nullopt);
    memcpy(bytes.mutable_data_ptr(), state.get(), sizeof(State));
    return bytes.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    state = static_cast<Generator*>(other.get())->state;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    auto same = c10::make_intrusive<Generator>(device().index());
    same->state = state;
    return same;
  }
  static c10::DeviceType device_type() { return c10::DeviceType::CUDA; }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    *copy->state = *state;
    return copy;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return the_config.count > 0; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override {
    return default_generator(i < 0 ? current_device() : i);
  }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current_device() : i);
  }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::DeviceType::CUDA, current_device()); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasMAGMA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool hasCuSOLVER() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  bool supportsDilatedConvolutionWithCuDNN() const override { return true; }
  bool supportsDepthwiseConvolutionWithCuDNN() const override { return true; }
  bool supportsBFloat16ConvolutionWithCuDNNv8() const override { return true; }
  bool supportsBFloat16RNNWithCuDNN() const override { return the_config.major >= 8; }
  long versionCuDNN() const override { return the_config.cudnn_version; }
  long versionRuntimeCuDNN() const override { return the_config.cudnn_version; }
  long versionCUDART() const override { return the_config.cuda_version; }
  std::string showConfig() const override { return "  - CUDA emulated by Maya\n"; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return maya::current_device(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  int getNumGPUs() const override { return the_config.count; }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
  c10::DeviceIndex deviceCount() const override { return the_config.count; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return maya::current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = maya::current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
};

struct Before {  // what torch had installed
  const c10::impl::DeviceGuardImplInterface* guard = nullptr;
  c10::Allocator* allocator = nullptr;
  void* hooks = nullptr;
} before;

// Blocks are recorded where they are allocated (memory.cpp); only the allocator knows about segments.
void record_segment(const MemoryEvent& event) {
  const bool made = event.action == MemoryAction::SegmentAlloc || event.action == MemoryAction::SegmentMap;
  const bool gone = event.action == MemoryAction::SegmentFree || event.action == MemoryAction::SegmentUnmap;
  if (made || gone)
    recorder().add(made ? EventKind::SegmentAlloc : EventKind::SegmentFree, event.device, event.stream, 0,
                   event.address, event.size);
}

}  // namespace

const DeviceConfig& config() { return the_config; }
bool installed() { return is_installed; }
CachingAllocator& allocator(int device) {
  TORCH_CHECK(device >= 0 && device < int(allocators.size()), "CUDA error: invalid device ordinal");
  return *allocators[device];
}

bool is_current(const CachingAllocator* one) {
  return std::any_of(allocators.begin(), allocators.end(), [one](const auto& each) { return each.get() == one; });
}

int current_device() { return this_device; }
void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < the_config.count, "CUDA error: invalid device ordinal\nDevice ", device,
              " was requested, but only ", the_config.count, the_config.count == 1 ? " is" : " are", " emulated.");
  this_device = device;
}
c10::StreamId current_stream(int device) { return this_stream[device]; }
void set_current_stream(int device, c10::StreamId stream) { this_stream[device] = stream; }

c10::StreamId stream_from_pool(int device, int priority) {
  const int level = std::clamp(-priority, 0, kPriorities - 1);
  const c10::StreamId taken = streams_taken[device][level]++ % kStreamsPerPool;
  return taken << 5 | (level + 1) << 1 | 1;
}
int stream_priority(c10::StreamId stream) { return from_pool(stream) ? 1 - int(stream >> 1 & 0xf) : 0; }

constexpr uint64_t kHandles = 0x5500'0000'0000ull;  // the range of the emulated cudaStream_t values
uint64_t stream_handle(int device, c10::StreamId stream) {
  return from_pool(stream) ? kHandles | uint64_t(device) << 24 | uint64_t(stream) << 4 : uint64_t(stream);
}
c10::StreamId stream_of_handle(uint64_t handle) {
  return handle >> 32 == kHandles >> 32 ? (handle >> 4) & 0xfffff : handle;
}

double elapsed_ms(uint64_t from, uint64_t to) {
  TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
  return (reinterpret_cast<Event*>(to)->time - reinterpret_cast<Event*>(from)->time) / 1e6;
}
void synchronize_stream(int device, c10::StreamId stream) {
  if (timing()) host_waits_for(device, stream);
  recorder().add(EventKind::StreamSync, device, stream, 0);
}
void synchronize_device(int device) {
  if (timing()) host_waits_for_device(device);
  recorder().add(EventKind::DeviceSync, device, 0, 0);
}

at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>;
    for (int i = 0; i < kMaxDevices; i++) all->push_back(at::make_generator<Generator>(i));
    return all;
  }();
  TORCH_CHECK(device >= 0 && device < kMaxDevices, "CUDA error: invalid device ordinal");
  return (*generators)[device];
}

uint64_t draw_seed(const std::optional<at::Generator>& given) {
  at::Generator generator = given && given->defined() ? *given : default_generator(current_device());
  std::lock_guard lock(generator.mutex());
  auto& state = *static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->state;
  state.offset += 4;
  uint64_t mixed = state.seed * 0x9E3779B97F4A7C15ull ^ (state.offset + 0x7F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  return mixed ^ (mixed >> 31);
}

void grow(int count) {
  TORCH_CHECK(count <= kMaxDevices, "at most ", kMaxDevices, " GPUs are emulated in a process");
  for (int device = int(allocators.size()); device < count; device++) {
    auto made =
        std::make_unique<CachingAllocator>(device, the_config.total_bytes, the_config.outside_bytes, the_settings);
    made->set_listener(record_segment);
    allocators.push_back(std::move(made));
    default_generator(device).set_current_seed(c10::default_rng_seed_val);
    for (auto& taken : streams_taken[device]) taken = 0;
  }
  the_config.count = int(allocators.size());
}

void install(DeviceConfig wanted, const OpNames& ops) {
  TORCH_CHECK(!is_installed, "the emulated device is installed already");
  the_settings = parse_allocator_settings(wanted.allocator_conf);
  forget_samples();
  the_config = std::move(wanted);
  grow(the_config.count);
  this_device = 0;
  this_stream.fill(0);
  before.guard = torch_abi::exchange_guard(&guard());
  before.allocator = c10::GetAllocator(c10::DeviceType::CUDA);
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 100);
  static auto* hooks = new Hooks;
  before.hooks = torch_abi::exchange_hooks(torch_abi::vtable_of(*hooks));
  register_kernels(ops);
  is_installed = true;
}

void uninstall() {
  if (!is_installed) return;
  unregister_kernels();
  clear_blas_workspaces();
  torch_abi::exchange_hooks(before.hooks);
  c10::SetAllocator(c10::DeviceType::CUDA, before.allocator, 100);
  // Futures of collectives and DDP's reducer need a guard when they are destroyed, which may be later. That of a CUDA
  // build would end the process on a machine without a driver.
  static const auto* none = new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
  const bool usable = before.guard && before.guard->deviceCount() > 0;
  torch_abi::exchange_guard(usable ? before.guard : none);
  for (auto& one : allocators) {
    one->set_listener({});
    retired.push_back(std::move(one));
  }
  allocators.clear();
  is_installed = false;
}

}  // namespace maya
