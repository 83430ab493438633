// The Python interface of the native device: thin functions for maya_core/device, one for each that torch.cuda needs.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "dispatch.h"
#include "kernels.h"
#include "lines.h"
#include "timing.h"
#include "torch_abi.h"
#include "values.h"

namespace maya {

void bind_collectives(pybind11::module_& m);

namespace {

namespace py = pybind11;
using c10::IValue;

// ---- calls in Python: a tensor becomes (dtype, sizes, strides, device type) ----
py::object describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return py::none();
  py::tuple sizes(tensor.dim()), strides(tensor.layout() == at::kStrided ? tensor.dim() : 0);
  for (int64_t i = 0; i < tensor.dim(); i++) sizes[i] = tensor.size(i);
  for (size_t i = 0; i < strides.size(); i++) strides[i] = tensor.stride(i);
  return py::make_tuple(c10::toString(tensor.scalar_type()), sizes, strides,
                        c10::DeviceTypeName(tensor.device().type(), true));
}

py::object describe(const IValue& value) {
  if (value.isTensor()) return describe(value.toTensor());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isSymInt()) return py::int_(value.toSymInt().guard_int(__FILE__, __LINE__));
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isList()) {
    py::list list;
    for (const auto& item : value.toListRef()) list.append(describe(item));
    return list;
  }
  return py::none();
}

py::list describe(at::ArrayRef<IValue> values) {
  py::list list;
  for (const auto& value : values) list.append(describe(value));
  return list;
}

class Side final : public PythonSide {
 public:
  Side(py::object planner, py::dict rules, py::object no_rule)
      : planner_(std::move(planner)), rules_(std::move(rules)), no_rule_(std::move(no_rule)) {}
  ~Side() override {
    py::gil_scoped_acquire gil;
    planner_ = py::object();
    rules_ = py::dict();
    no_rule_ = py::object();
  }

  Plan plan(const std::string& op, const c10::FunctionSchema* schema, at::ArrayRef<IValue> arguments,
            at::ArrayRef<IValue> returns, uint64_t settings) override {
    py::gil_scoped_acquire gil;
    py::list names;
    if (schema)
      for (const auto& argument : schema->arguments()) names.append(argument.name());
    auto made = planner_(op, names, describe(arguments), describe(returns), settings).cast<py::tuple>();
    Plan plan;
    plan.call = made[0].cast<uint32_t>();
    if (!made[1].is_none()) {
      plan.has_program = true;
      plan.program = made[1].cast<std::vector<std::pair<int64_t, int64_t>>>();
    }
    return plan;
  }
  bool has_rule(const std::string& op) override {
    py::gil_scoped_acquire gil;
    return rules_.contains(op);
  }
  void call_rule(const std::string& op, const c10::FunctionSchema& schema, torch::jit::Stack* stack) override {
    py::gil_scoped_acquire gil;
    const size_t count = schema.arguments().size(), base = stack->size() - count;
    py::tuple arguments(count);
    for (size_t i = 0; i < count; i++) arguments[i] = torch::jit::toPyObject((*stack)[base + i]);
    stack->resize(base);
    py::object result = rules_[op.c_str()](*arguments);
    const auto& returns = schema.returns();
    if (returns.size() == 1) {
      stack->push_back(torch::jit::toIValue(result, returns[0].type()));
    } else {
      auto results = result.is_none() ? py::tuple() : result.cast<py::tuple>();
      TORCH_CHECK(results.size() == returns.size(), "the rule for ", op, " gave ", results.size(),
                  " results, the op has ", returns.size());
      for (size_t i = 0; i < returns.size(); i++) stack->push_back(torch::jit::toIValue(results[i], returns[i].type()));
    }
  }
  std::optional<std::string> not_implemented(std::exception_ptr raised) override {
    py::gil_scoped_acquire gil;
    try {
      std::rethrow_exception(raised);
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_NotImplementedError)) return error.what();
    } catch (python_error& error) {
      if (PyErr_GivenExceptionMatches(error.type, PyExc_NotImplementedError)) return error.what();
    } catch (...) {}
    return std::nullopt;
  }
  std::string no_rule_message(const std::string& op, const std::string& reason) override {
    py::gil_scoped_acquire gil;
    return no_rule_(op, reason).cast<std::string>();
  }

 private:
  py::object planner_;
  py::dict rules_;
  py::object no_rule_;
};

// Converts what a call's key and plan depend on; anything else becomes None.
IValue recordable(const py::object& value) {
  if (THPVariable_Check(value.ptr())) return value.cast<at::Tensor>();
  if (py::isinstance<py::bool_>(value)) return value.cast<bool>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (!py::isinstance<py::list>(value)) return {};
  auto items = value.cast<std::vector<py::object>>();
  if (std::all_of(items.begin(), items.end(), [](const auto& item) { return bool(THPVariable_Check(item.ptr())); }) &&
      !items.empty())
    return c10::List<at::Tensor>(value.cast<std::vector<at::Tensor>>());
  c10::List<int64_t> numbers;
  for (const auto& item : items)
    if (py::isinstance<py::int_>(item)) numbers.push_back(item.cast<int64_t>());
  return numbers;
}

DeviceConfig config_from(const py::dict& from) {
  DeviceConfig to;
  to.count = from["count"].cast<int>();
  to.major = from["major"].cast<int>();
  to.minor = from["minor"].cast<int>();
  to.total_bytes = from["total_bytes"].cast<int64_t>();
  to.outside_bytes = from["outside_bytes"].cast<int64_t>();
  to.prefer_cudnn_attention = from["prefer_cudnn_attention"].cast<bool>();
  to.deprioritize_cudnn_attention = from["deprioritize_cudnn_attention"].cast<bool>();
  to.allocator_conf = from["allocator_conf"].cast<std::string>();
  to.cudnn_version = from["cudnn_version"].cast<int64_t>();
  to.cuda_version = from["cuda_version"].cast<int64_t>();
  return to;
}

// ---- memory statistics and snapshots, in the form of torch._C._cuda_* ----
py::dict stat(const Stat& from) {
  py::dict to;
  to["current"] = from.current;
  to["peak"] = from.peak;
  to["allocated"] = from.allocated;
  to["freed"] = from.freed;
  return to;
}
py::dict stats_by_pool(const PoolStats& from) {
  py::dict to;
  to["all"] = stat(from[0]);
  to["small_pool"] = stat(from[1]);
  to["large_pool"] = stat(from[2]);
  return to;
}

py::dict memory_stats(int device) {
  const auto from = allocator(device).stats();
  py::dict to;
  to["num_alloc_retries"] = from.num_alloc_retries;
  to["num_ooms"] = from.num_ooms;
  to["max_split_size"] = from.max_split_size;
  to["num_sync_all_streams"] = from.num_sync_all_streams;
  to["num_device_alloc"] = from.num_device_alloc;
  to["num_device_free"] = from.num_device_free;
  to["num_oom_rejections"] = from.num_oom_rejections;
  to["allocation"] = stats_by_pool(from.allocation);
  to["segment"] = stats_by_pool(from.segment);
  to["active"] = stats_by_pool(from.active);
  to["inactive_split"] = stats_by_pool(from.inactive_split);
  to["allocated_bytes"] = stats_by_pool(from.allocated_bytes);
  to["reserved_bytes"] = stats_by_pool(from.reserved_bytes);
  to["reserved_bytes_by_private_pools"] = py::dict();
  to["active_bytes"] = stats_by_pool(from.active_bytes);
  to["inactive_split_bytes"] = stats_by_pool(from.inactive_split_bytes);
  to["requested_bytes"] = stats_by_pool(from.requested_bytes);
  to["oversize_allocations"] = stat(from.oversize_allocations);
  to["oversize_segments"] = stat(from.oversize_segments);
  return to;
}

using Traceback = torch::CapturedTraceback;

// Symbolizes all call stacks of a snapshot at once, because most are shared.
struct Stacks {
  std::unordered_map<Traceback*, py::list> frames;
  std::vector<Traceback*> wanted;
  void want(const std::shared_ptr<void>& context) {
    if (context) wanted.push_back(static_cast<Traceback*>(context.get()));
  }
  void resolve() {
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    if (wanted.empty()) return;
    auto symbolized = torch::symbolize(wanted);
    std::vector<py::dict> all;
    for (const auto& frame : symbolized.all_frames) {
      py::dict one;
      one["name"] = frame.funcname;
      one["filename"] = frame.filename;
      one["line"] = frame.lineno;
      all.push_back(one);
    }
    for (size_t i = 0; i < wanted.size(); i++) {
      py::list list;
      for (auto index : symbolized.tracebacks[i]) list.append(all[index]);
      frames[wanted[i]] = list;
    }
  }
  py::list of(const std::shared_ptr<void>& context) {
    return context ? frames[static_cast<Traceback*>(context.get())] : py::list();
  }
};

const char* action_name(MemoryAction action) {
  switch (action) {
    case MemoryAction::Alloc: return "alloc";
    case MemoryAction::FreeRequested: return "free_requested";
    case MemoryAction::FreeCompleted: return "free_completed";
    case MemoryAction::SegmentAlloc: return "segment_alloc";
    case MemoryAction::SegmentFree: return "segment_free";
    case MemoryAction::SegmentMap: return "segment_map";
    case MemoryAction::SegmentUnmap: return "segment_unmap";
    case MemoryAction::Snapshot: return "snapshot";
    case MemoryAction::OutOfMemory: return "oom";
  }
  return "?";
}

py::dict memory_snapshot(MempoolId pool, bool with_history) {
  std::vector<SegmentInfo> segments;
  std::vector<std::vector<MemoryEvent>> histories;
  Stacks stacks;
  for (int device = 0; device < config().count; device++) {
    // Read before the snapshot, which is an event of the history itself.
    histories.push_back(with_history ? allocator(device).history() : std::vector<MemoryEvent>());
    for (auto& segment : allocator(device).snapshot(pool)) segments.push_back(std::move(segment));
  }
  for (const auto& segment : segments) {
    stacks.want(segment.context);
    for (const auto& block : segment.blocks) stacks.want(block.context);
  }
  for (const auto& history : histories)
    for (const auto& event : history) stacks.want(event.context);
  stacks.resolve();

  py::list segment_list, traces;
  for (const auto& from : segments) {
    py::dict to;
    to["device"] = from.device;
    to["address"] = from.address;
    to["total_size"] = from.total_size;
    to["allocated_size"] = from.allocated_size;
    to["active_size"] = from.active_size;
    to["requested_size"] = from.requested_size;
    to["stream"] = stream_handle(from.device, from.stream);
    to["segment_type"] = from.is_large ? "large" : "small";
    to["segment_pool_id"] = from.owner_pool;
    to["is_expandable"] = from.is_expandable;
    to["frames"] = stacks.of(from.context);
    py::list blocks;
    for (const auto& block : from.blocks) {
      py::dict one;
      one["address"] = block.address;
      one["size"] = block.size;
      one["requested_size"] = block.requested_size;
      one["state"] = block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive";
      one["frames"] = stacks.of(block.context);
      blocks.append(one);
    }
    to["blocks"] = blocks;
    segment_list.append(to);
  }
  for (const auto& history : histories) {
    py::list trace;
    for (const auto& event : history) {
      py::dict one;
      one["action"] = action_name(event.action);
      one[event.action == MemoryAction::OutOfMemory ? "device_free" : "addr"] = event.address;
      one["size"] = event.size;
      one["stream"] = stream_handle(event.device, event.stream);
      one["time_us"] = event.time_us;
      one["pool_id"] = event.pool;
      one["compile_context"] = "N/A";
      one["user_metadata"] = "";
      one["frames"] = stacks.of(event.context);
      trace.append(one);
    }
    traces.append(trace);
  }
  py::dict result;
  result["segments"] = segment_list;
  result["device_traces"] = traces;
  result["external_annotations"] = py::list();
  return result;
}

void record_memory_history(bool enabled, bool contexts, size_t max_entries, bool context_on_free) {
  std::function<std::shared_ptr<void>()> gather;
  if (contexts) gather = []() -> std::shared_ptr<void> { return Traceback::gather(true, true, false); };
  for (int device = 0; device < config().count; device++)
    allocator(device).record_history(enabled, gather, max_entries, context_on_free);
}

py::bytes take_events() {
  const auto events = recorder().take();
  return py::bytes(reinterpret_cast<const char*>(events.data()), events.size() * sizeof(TraceEvent));
}

// ---- nn.Module.__call__ that notes the module; in C++ so that it is cheap and stays out of users' tracebacks ----
struct ModuleNumbers {
  std::unordered_map<PyObject*, std::pair<uint32_t, py::weakref>> numbers;
  py::object original, name_tree;
  // Watchers with the signatures of torch's module hooks: before(module, args), after(module, args, kwargs, result).
  py::object before, after;
};
ModuleNumbers& module_numbers() {
  static auto* instance = new ModuleNumbers;
  return *instance;
}

void number_module(py::handle module, uint32_t number) {
  PyObject* key = module.ptr();
  auto forget = py::cpp_function([key](py::handle) { module_numbers().numbers.erase(key); });
  module_numbers().numbers.insert_or_assign(key, std::pair(number, py::weakref(module, forget)));
}

// Does not use torch's own hooks: torch.compile would trace them, and recompile when they are removed.
bool watched(const py::object& watcher, PyObject* module, PyObject* args, PyObject* kwargs, PyObject* result) {
  try {
    const py::object kept = watcher;  // it may remove itself
    const auto given = py::reinterpret_steal<py::tuple>(PyTuple_GetSlice(args, 1, PyTuple_GET_SIZE(args)));
    if (result)
      kept(py::handle(module), given, kwargs ? py::reinterpret_borrow<py::dict>(kwargs) : py::dict(),
           py::handle(result));
    else kept(py::handle(module), given);
    return true;
  } catch (py::error_already_set& error) {
    error.restore();
    return false;
  }
}

PyObject* call_module(PyObject*, PyObject* args, PyObject* kwargs) {
  auto& known = module_numbers();
  // torch.jit.trace makes a module that is called afterwards in this one's place.
  if (torch_abi::tracing()) return PyObject_Call(known.original.ptr(), args, kwargs);
  PyObject* module = PyTuple_GET_ITEM(args, 0);
  auto found = known.numbers.find(module);
  if (found == known.numbers.end()) {
    try {
      known.name_tree(py::handle(module));
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    }
    found = known.numbers.find(module);
  }
  const uint32_t number = found == known.numbers.end() ? 0 : found->second.first;
  if (known.before && !watched(known.before, module, args, kwargs, nullptr)) return nullptr;
  enter_module(number);
  PyObject* result = PyObject_Call(known.original.ptr(), args, kwargs);
  leave_module();
  if (result && known.after && !watched(known.after, module, args, kwargs, result)) Py_CLEAR(result);
  return result;
}
// Binds to its instance as a Python function does, and is itself when read from the class: code that patches
// nn.Module.__call__ for a while, such as torch.fx, restores what it read there.
PyObject* bind_module_call(PyObject* self, PyObject* instance, PyObject*) {
  return instance ? PyMethod_New(self, instance) : Py_NewRef(self);
}
PyType_Slot module_call_slots[] = {{Py_tp_call, reinterpret_cast<void*>(&call_module)},
                                   {Py_tp_descr_get, reinterpret_cast<void*>(&bind_module_call)},
                                   {0, nullptr}};
PyType_Spec module_call_spec = {"maya_native.ModuleCall", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, module_call_slots};

py::object recorded_module_call(py::object original, py::object name_tree) {
  module_numbers() = {{}, std::move(original), std::move(name_tree), {}, {}};
  static auto* type = PyType_FromSpec(&module_call_spec);
  return py::reinterpret_steal<py::object>(PyObject_CallNoArgs(type));
}

py::object current_stream_data(int device, c10::StreamId stream) {
  return py::make_tuple(stream, device, int(c10::DeviceType::CUDA));
}

// ---- the module, by subject ----
void bind_installation(py::module_& m) {
  m.def("install",
        [](const py::dict& wanted, const std::vector<std::string>& cuda_ops, const std::vector<std::string>& sparse_ops,
           const std::vector<std::string>& nested_ops, py::object planner, py::dict rules, py::object no_rule) {
          set_python_side(std::make_unique<Side>(planner, rules, no_rule));
          try {
            install(config_from(wanted), {cuda_ops, sparse_ops, nested_ops});
            // Otherwise torch calls its _lazy_init only once per process.
            torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true);
          } catch (...) {
            set_python_side(nullptr);
            throw;
          }
        });
  // Makes torch ask its Python side before the next use of the device, which refuses it in a fork.
  m.def("require_initialization", [] { torch::utils::set_requires_device_init(c10::DeviceType::CUDA, true); });
  m.def("uninstall", [] {
    uninstall();
    set_python_side(nullptr);
  });
  m.def("installed", &installed);
  m.def("grow", &grow);
  m.def(
      "start_engine_threads", [] { torch_abi::start_engine_threads(config().count); },
      py::call_guard<py::gil_scoped_release>());
}

void bind_devices_and_streams(py::module_& m) {
  m.def("take_pageable_copies", &take_pageable_copies);
  m.def("device_count", [] { return config().count; });
  m.def("get_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("exchange_device", [](int device) {
    int before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  });
  m.def("current_stream", [](int device) { return current_stream_data(device, current_stream(device)); });
  m.def("current_raw_stream", [](int device) { return stream_handle(device, current_stream(device)); });
  m.def("default_stream", [](int device) { return current_stream_data(device, 0); });
  m.def("set_stream", [](c10::StreamId stream, int device) {
    set_current_device(device);
    set_current_stream(device, stream);
  });
  m.def("stream_from_pool", &stream_from_pool);
  m.def("stream_handle", &stream_handle);
  m.def("stream_of_handle", &stream_of_handle);
  m.def("stream_priority", &stream_priority);
  m.def("elapsed_ms", &elapsed_ms);
  m.def("synchronize", [] { synchronize_device(current_device()); });
  m.def("synchronize_current_stream", [](int device) { synchronize_stream(device, current_stream(device)); });
  m.def("default_generator", [](int device) { return default_generator(device); });
}

void bind_timing(py::module_& m) {
  m.def("start_timing", &start_timing);
  m.def("host_time_ns", &host_time);
  m.def("set_pricing", [](py::object call, py::object collective, const std::vector<double>& dispatch_ns,
                          double collective_ns, double graph_ns, double sync_ns) {
    Pricing pricing;
    auto keep = [](py::object function) {  // released while the GIL is held
      return std::shared_ptr<py::object>(new py::object(std::move(function)), [](py::object* held) {
        py::gil_scoped_acquire gil;
        delete held;
      });
    };
    if (!call.is_none())
      pricing.call = [held = keep(call)](uint32_t number) {
        py::gil_scoped_acquire gil;
        auto [device, host, dispatched] = (*held)(number).cast<std::tuple<double, double, bool>>();
        return Cost{device, host, dispatched};
      };
    if (!collective.is_none())
      pricing.collective = [held = keep(collective)](uint32_t number) {
        py::gil_scoped_acquire gil;
        return (*held)(number).cast<double>();
      };
    for (size_t i = 0; i < std::min<size_t>(dispatch_ns.size(), 4); i++) pricing.host.dispatch_ns[i] = dispatch_ns[i];
    pricing.host.collective_ns = collective_ns;
    pricing.host.graph_ns = graph_ns;
    pricing.host.sync_ns = sync_ns;
    set_pricing(std::move(pricing));
  });
}

// Computing a value may wait for another thread, which may need Python's lock.
template <class Read>
auto without_python(Read read) {
  py::gil_scoped_release released;
  return read();
}

void bind_op_tables(py::module_& m) {
  m.def("setting_names", &setting_names);
  m.def("set_default_settings", &set_default_settings);
  m.def("set_op_values", [](const std::map<std::string, std::tuple<int, int, bool, bool, bool, bool>>& given) {
    std::unordered_map<std::string, OpValues> table;
    for (const auto& [name, declared] : given)
      table[name] = {Assume(std::get<0>(declared)), Sample(std::get<1>(declared)), std::get<2>(declared),
                     std::get<3>(declared),         std::get<4>(declared),         std::get<5>(declared)};
    set_op_values(std::move(table));
  });
  // Numbers that Python has, too; a test checks that they agree.
  m.attr("PLAN_STEPS") =
      py::dict(py::arg("OUTPUT") = int(Plan::Output), py::arg("TEMPORARY") = int(Plan::Temporary),
               py::arg("FREE") = int(Plan::FreeTemporary), py::arg("BLAS_WORKSPACE") = int(Plan::BlasWorkspace),
               py::arg("HOST_OUTPUT") = int(Plan::HostOutput), py::arg("STORAGE") = int(Plan::Storage),
               py::arg("LT_WORKSPACE") = int(Plan::LtWorkspace));
  m.attr("ASSUMPTIONS") = py::dict(
      py::arg("NOTHING") = int(Assume::Nothing), py::arg("ALL_FINITE") = int(Assume::AllFinite),
      py::arg("TRUE") = int(Assume::True), py::arg("FALSE") = int(Assume::False),
      py::arg("RANDOM_INDICES") = int(Assume::RandomIndices), py::arg("SAME_IS_EQUAL") = int(Assume::SameIsEqual),
      py::arg("COMPARE_INFINITY") = int(Assume::CompareInfinity));
  m.attr("SAMPLES") = py::dict(py::arg("ANY") = int(Sample::Any), py::arg("POSITIVE") = int(Sample::Positive),
                               py::arg("UNIT") = int(Sample::Unit), py::arg("AS_INPUTS") = int(Sample::AsInputs),
                               py::arg("NEGATIVE") = int(Sample::Negative));
}

void bind_memory(py::module_& m) {
  m.def("take_outside", [](int device, int64_t bytes) {
    if (allocator(device).take_outside(bytes)) return;
    recorder().add(EventKind::OutOfMemory, device, current_stream(device), 0, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. NCCL tried to allocate ", bytes >> 20,
                     " MiB for the buffers of a communicator.");
  });
  m.def("memory_stats", &memory_stats);
  m.def("memory_snapshot", &memory_snapshot);
  m.def("memory_info", [](int device) { return allocator(device).memory_info(); });
  m.def("reset_peak_memory_stats", [](int device) { allocator(device).reset_peak_stats(); });
  m.def("reset_accumulated_memory_stats", [](int device) { allocator(device).reset_accumulated_stats(); });
  m.def("empty_cache", [](MempoolId pool) {
    for (int device = 0; device < config().count; device++) allocator(device).empty_cache(pool);
  });
  m.def("set_memory_fraction", [](double fraction, int device) { allocator(device).set_memory_fraction(fraction); });
  m.def("memory_fraction", [](int device) { return allocator(device).memory_fraction(); });
  m.def("record_memory_history", &record_memory_history);
  m.def("clear_blas_workspaces", &clear_blas_workspaces);
  m.def("storage_resize",
        [](c10::Storage storage, int64_t bytes) { resize_storage(storage.unsafeGetStorageImpl(), bytes); });
  m.def("raw_alloc", [](int64_t bytes, uint64_t stream) {
    const int device = current_device();
    auto before = current_stream(device);
    set_current_stream(device, stream_of_handle(stream));
    auto* memory = new c10::DataPtr(device_allocator()->allocate(bytes));
    set_current_stream(device, before);
    return py::make_tuple(reinterpret_cast<uint64_t>(memory->get()), reinterpret_cast<uint64_t>(memory));
  });
  m.def("raw_delete", [](uint64_t token) { delete reinterpret_cast<c10::DataPtr*>(token); });
}

void bind_pools(py::module_& m) {
  m.def("begin_allocate_to_pool", [](int device, MempoolId pool) {
    const auto stream = current_stream(device);
    allocator(device).begin_allocate_to_pool(pool, [stream](int64_t used) { return used == stream; });
  });
  m.def("begin_allocate_all_to_pool", [](int device, MempoolId pool) {
    allocator(device).begin_allocate_to_pool(pool, [](int64_t) { return true; });
  });
  m.def("end_allocate_to_pool", [](int device, MempoolId pool) { allocator(device).end_allocate_to_pool(pool); });
  m.def("create_pool", [](int device, MempoolId pool, bool use_on_oom, bool no_split) {
    allocator(device).create_or_keep_pool(pool);
    if (use_on_oom) allocator(device).set_use_on_oom(pool, true);
    if (no_split) allocator(device).set_no_split(pool);
  });
  m.def("destroy_pool", [](int device, MempoolId pool) {
    allocator(device).set_use_on_oom(pool, false);
    allocator(device).release_pool(pool);
    allocator(device).empty_cache(pool);
  });
  m.def("release_pool", [](int device, MempoolId pool) { allocator(device).release_pool(pool); });
  m.def("pool_use_count", [](int device, MempoolId pool) { return allocator(device).pool_use_count(pool); });
}

void bind_graphs(py::module_& m) {
  m.def("capturing", &capturing);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", [](Graph& graph, MempoolId pool) { begin_capture(graph, pool); })
      .def("capture_end", [](Graph& graph) { end_capture(graph); })
      .def("replay", [](Graph& graph) { replay(graph); })
      .def("reset", [](Graph& graph) { reset(graph); })
      .def_property_readonly("pool", [](Graph& graph) { return graph.pool; })
      .def_property_readonly("kernels", [](Graph& graph) { return graph.work.size(); });
  // What inductor's CUDA graph trees do with tensors and storages whose memory a graph owns
  // (torch/csrc/cuda/Module.cpp).
  m.def("tensor_on_storage", [](const c10::Storage& storage, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                                int64_t offset, at::ScalarType dtype) {
    auto tensor = at::detail::make_tensor_base<c10::TensorImpl>(
        c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::scalarTypeToTypeMeta(dtype));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return at::Tensor(std::move(tensor));
  });
  m.def("free_and_forget_memory",
        [](size_t storage) { free_and_forget_memory(reinterpret_cast<c10::StorageImpl*>(storage)); });
  m.def("forbid_tensor", [](const at::Tensor& tensor, const std::string& why) {
    tensor.unsafeGetTensorImpl()->release_storage_and_set_meta_custom_data_ptr_error_msg_(why);
  });
  m.def("forbid_storage", [](size_t storage, const std::string& why) {
    reinterpret_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  });
}

void bind_values(py::module_& m) {
  m.def("is_known", &is_known);
  m.def("host_value", [](const at::Tensor& tensor) -> py::object {
    auto value = without_python([&] {
      auto found = host_value(tensor);
      return found ? std::optional(found->clone()) : std::nullopt;
    });
    return value ? py::cast(*value) : py::none();
  });
  m.def("read_value", [](const at::Tensor& tensor) -> py::object {
    auto reading = without_python([&] { return read(tensor); });
    return reading ? py::make_tuple(reading->value, reading->unknown, reading->routed) : py::object(py::none());
  });
  m.def("remember", &remember, py::arg("tensor"), py::arg("host"), py::arg("made_up") = false,
        py::call_guard<py::gil_scoped_release>());
  m.def("follow",
        [](const std::string& name, const std::vector<py::object>& given, const std::vector<at::Tensor>& outputs) {
          const auto dot = name.find('.');
          const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
              name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
          std::vector<IValue> arguments;
          for (size_t i = 0; i < given.size(); i++)
            arguments.push_back(torch::jit::toIValue(given[i], op.schema().arguments()[i].type()));
          without_python([&] { follow(op, arguments, outputs); });
        });
  m.def("remember_parts", &remember_parts, py::arg("parts"), py::arg("hosts"), py::arg("made_up") = false,
        py::call_guard<py::gil_scoped_release>());
  m.def("carry_objects", &carry_objects);
  m.def("forget", [](const at::Tensor& tensor) { forget(tensor); });
  m.def("is_made_up", &is_made_up);
  m.def("mark_made_up", &mark_made_up);
  m.def("set_extreme", &set_extreme);
  m.def("exclude_time", [](double seconds) { exclude_time(int64_t(seconds * 1e9)); });
  m.def("set_on_unknown", [](py::object callback) {
    if (callback.is_none()) return set_on_unknown(nullptr);
    const std::shared_ptr<py::object> kept(new py::object(std::move(callback)), [](py::object* object) {
      py::gil_scoped_acquire gil;
      delete object;
    });
    set_on_unknown(
        [kept](const char* how, const at::Tensor& device, const at::Tensor& sample) -> std::optional<at::Scalar> {
          py::gil_scoped_acquire gil;
          py::object other = (*kept)(how, device, sample);
          if (other.is_none()) return std::nullopt;
          if (py::isinstance<py::bool_>(other)) return at::Scalar(other.cast<bool>());
          return at::Scalar(other.cast<double>());
        });
  });
}

void bind_recorder(py::module_& m) {
  m.def("record_call",
        [](const std::string& op, const std::vector<py::object>& arguments, const std::vector<at::Tensor>& returns) {
          std::vector<IValue> values, results;
          for (const auto& argument : arguments) values.push_back(recordable(argument));
          for (const auto& one : returns) results.emplace_back(one);
          int device = current_device();
          for (const auto& value : values)
            if (value.isTensor() && value.toTensor().is_cuda()) {
              device = value.toTensor().get_device();
              break;
            }
          OnDevice on(device);
          record_call(op, values, results);
        });
  m.def("calls", &calls);
  m.def("distinct_calls", &distinct_calls);
  m.def("start_recording", [] { recorder().start(); });
  m.def("stop_recording", [] { recorder().stop(); });
  m.def("take_events", &take_events);
  m.def("event_count", [] { return recorder().size(); });
  m.def("record_host_work", [](int64_t bytes) {
    recorder().add(EventKind::HostWork, current_device(), current_stream(current_device()), 0, bytes);
  });
  m.def("begin_aside", &begin_aside);
  m.def("end_aside", &end_aside);
  m.def("lines", &lines);
  m.def("library_folders", &library_folders);
  m.def("streams", [] { return recorder().streams(); });
  m.def("label", [](const std::vector<at::Tensor>& tensors, uint32_t category) {
    for (const auto& tensor : tensors) {
      if (!tensor.is_cuda()) continue;
      if (Category(category) == Category::Parameter) without_python([&] { mark_weights(tensor); });
      if (auto* allocation = allocation_of(tensor.unsafeGetTensorImpl()))
        recorder().add(EventKind::Label, allocation->device, stream_of(allocation->block), category,
                       address_of(allocation->block));
    }
  });
  m.def("allocate_as", &allocate_as);
  m.def("current_place", [] {
    const auto [module, phase] = current_place();
    return std::pair(module, int(phase));
  });
}

void bind_module_calls(py::module_& m) {
  m.def("recorded_module_call", &recorded_module_call);
  m.def("number_module", &number_module);
  m.def("watch_modules", [](py::object before, py::object after) {
    auto& known = module_numbers();
    known.before = before.is_none() ? py::object() : std::move(before);
    known.after = after.is_none() ? py::object() : std::move(after);
  });
  m.def("forget_module_numbers", [] { module_numbers() = {}; });
  m.def("enter_optimizer", &enter_optimizer);
  m.def("leave_optimizer", &leave_optimizer);
}

}  // namespace
}  // namespace maya

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace maya;
  bind_installation(m);
  bind_devices_and_streams(m);
  bind_timing(m);
  bind_op_tables(m);
  bind_memory(m);
  bind_pools(m);
  bind_graphs(m);
  bind_values(m);
  bind_recorder(m);
  bind_module_calls(m);
  bind_collectives(m);
}
