// Everything that reaches into torch beyond its public C++ interface, and the interfaces that differ between the
// versions of torch that Maya supports. Other files include this one and contain no version checks of their own. Each
// part says which versions it was checked on; `make test-torch TORCH=...` checks them again.
#pragma once
#include <ATen/Context.h>
#include <ATen/TracerMode.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>
#include <utility>
#include <vector>

#include "torch_version.h"

// Virtual functions that an earlier torch does not have yet: there they are functions that nobody calls.
#if MAYA_TORCH_SINCE(2, 11)
#define MAYA_OVERRIDE_SINCE_2_11 override
#else
#define MAYA_OVERRIDE_SINCE_2_11
#endif
#if MAYA_TORCH_SINCE(2, 12)
#define MAYA_OVERRIDE_SINCE_2_12 override
#else
#define MAYA_OVERRIDE_SINCE_2_12
#endif

namespace maya::torch_abi {

// ---- the CUDA hooks; checked on 2.10 to 2.15 ----
// torch keeps its hooks object in a static variable. It has no data members, in a CPU build and in a CUDA build, so
// replacing its vtable replaces the hooks. Returns the vtable that was there.
static_assert(sizeof(at::CUDAHooksInterface) == sizeof(void*), "CUDAHooksInterface has grown data members");
inline void* exchange_hooks(void* vtable) {
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  return std::exchange(*reinterpret_cast<void**>(&hooks), vtable);
}
inline void* vtable_of(at::CUDAHooksInterface& hooks) { return *reinterpret_cast<void**>(&hooks); }

// ---- the registry of device guards; checked on 2.10 to 2.15 ----
using DeviceGuard = c10::impl::DeviceGuardImplInterface;
inline const DeviceGuard* exchange_guard(const DeviceGuard* guard) {
  return c10::impl::device_guard_impl_registry[size_t(c10::DeviceType::CUDA)].exchange(guard);
}

// ---- private members, in code that needs no friend; explicit instantiation ignores access, legally ----
template <auto Member, int Tag>
struct Access {
  friend auto private_member(std::integral_constant<int, Tag>) { return Member; }
};
auto private_member(std::integral_constant<int, 0>);
auto private_member(std::integral_constant<int, 1>);
auto private_member(std::integral_constant<int, 2>);

// ---- autograd's device threads; checked on 2.10 to 2.15 ----
using torch::autograd::Engine;
template struct Access<&Engine::device_ready_queues_, 0>;
template struct Access<&Engine::non_reentrant_device_thread_count_, 1>;
template struct Access<&Engine::start_device_threads, 2>;

// The engine starts its threads once, on the first backward. If that was before there were so many devices, this starts
// them now.
inline void start_engine_threads(int devices) {
  auto& engine = Engine::get_default_engine();
  const auto queues = private_member(std::integral_constant<int, 0>{});
  if (int((engine.*queues).size()) >= devices) return;
  (engine.*private_member(std::integral_constant<int, 1>{})).store(0);
  (engine.*private_member(std::integral_constant<int, 2>{}))();
}

// ---- torch.jit.trace; checked on 2.10 to 2.15 ----
// While it traces, sizes are tensors in Python, and what is done with tensors becomes part of the traced program. What
// Maya does itself must not. The state is exchanged in its place, because setTracingState refuses to be called where
// the dispatcher excludes the tracer, as it does below most kernels.
inline bool tracing() { return torch::jit::tracer::isTracing(); }

class Untraced {
 public:
  Untraced() {
    if (!tracing()) return;
    below_.emplace();
    std::swap(state(), kept_);
  }
  ~Untraced() {
    if (kept_) std::swap(state(), kept_);
  }
  Untraced(const Untraced&) = delete;
  Untraced& operator=(const Untraced&) = delete;

 private:
  using State = std::shared_ptr<torch::jit::tracer::TracingState>;
  static State& state() { return const_cast<State&>(torch::jit::tracer::getTracingState()); }
  State kept_;
  std::optional<at::tracer::impl::NoTracerDispatchMode> below_;
};

// ---- TF32 in cuDNN ----
// Until 2.12 the default of convolutions is TF32 itself. Since 2.13 it is a value of its own, which means TF32, too.
inline bool convolutions_use_tf32(const at::Context& context) {
  const auto precision = context.float32Precision(at::Float32Backend::CUDA, at::Float32Op::CONV);
#if MAYA_TORCH_SINCE(2, 13)
  if (precision == at::Float32Precision::DEFAULT) return true;
#endif
  return precision == at::Float32Precision::TF32;
}

// ---- kernels that ATen calls through a pointer for each device (cuDNN's recurrent networks, the choice of attention);
// checked on 2.10 to 2.15 ----
class ReplacedStubs {
 public:
  template <class Stub, class Function>
  void set(Stub& stub, Function* kernel) {
    static_assert(sizeof(Stub) == sizeof(at::native::DispatchStubImpl), "DispatchStub has grown data members");
    void*& slot = reinterpret_cast<at::native::DispatchStubImpl&>(stub).cuda_dispatch_ptr;
    before_.emplace_back(&slot, slot);
    stub.set_cuda_dispatch_ptr(kernel);
  }
  void restore() {
    for (auto [slot, pointer] : before_) *slot = pointer;
    before_.clear();
  }

 private:
  std::vector<std::pair<void**, void*>> before_;
};

}  // namespace maya::torch_abi
