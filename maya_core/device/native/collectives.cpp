// The emulated NCCL and gloo: process groups that do to streams, events and memory what torch's own do, without a peer.
// A collective completes at once; which ranks take part in it is found out when the ranks' traces are collated.
//
// As in ProcessGroupNCCL (torch 2.13), a blocking call runs on the current stream, an asynchronous one on the
// communicator's own stream behind an event, and tensors in flight are kept alive until the work is waited for.
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "device.h"
#include "lines.h"
#include "timing.h"
#include "values.h"

namespace maya {
namespace {

namespace py = pybind11;
using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Settle = std::function<void()>;

// One call on a communicator, a row of the trace's table of calls. Ranks are numbered within the communicator.
struct CollectiveCall {
  uint32_t communicator = 0;
  std::string op;
  std::string dtype;
  int64_t elements_in = 0, elements_out = 0;  // given and received by this rank
  int64_t peer = -1;                          // root, source or destination
  std::string reduction;
  std::vector<int64_t> splits_in, splits_out;  // of an uneven exchange, in elements
};

// The Python side (maya_core/collectives): tables, call stacks and the values that ranks exchange.
class PythonCollectives {
 public:
  explicit PythonCollectives(py::object side) : side_(std::move(side)) {}
  ~PythonCollectives() {
    py::gil_scoped_acquire gil;
    side_ = py::object();
  }
  uint32_t communicator(const std::string& backend, const std::string& name, const std::vector<int64_t>& ranks,
                        int rank) {
    py::gil_scoped_acquire gil;
    return side_.attr("communicator")(backend, name, ranks, rank).cast<uint32_t>();
  }
  // The number of the call and the number of the place in the program that makes it.
  std::pair<uint32_t, int64_t> note(const CollectiveCall& c) {
    py::gil_scoped_acquire gil;
    return {number_of(c), site_of(call_stack("maya_core.collectives"))};
  }
  void forget_calls() {
    calls_.clear();
    sites_.clear();
  }
  // Gives this rank's values to the others. A returned function waits for theirs and writes them to `outputs`.
  Settle exchange(const CollectiveCall& c, int64_t sequence, const Tensors& inputs, const Tensors& outputs) {
    py::gil_scoped_acquire gil;
    py::object settle =
        side_.attr("exchange")(c.communicator, c.op, sequence, c.peer, c.reduction, c.splits_in, inputs, outputs);
    if (settle.is_none()) return {};
    std::shared_ptr<py::object> held(new py::object(std::move(settle)), [](py::object* object) {
      py::gil_scoped_acquire gil_at_release;
      delete object;
    });
    return [held] {
      py::gil_scoped_acquire gil_when_settled;
      (*held)();
    };
  }
  // Notes that a point-to-point message goes to or comes from that rank.
  void meet(int64_t global_rank) {
    py::gil_scoped_acquire gil;
    side_.attr("meet")(global_rank);
  }

 private:
  // Python is called once for each distinct call and place, because programs repeat the same ones.
  uint32_t number_of(const CollectiveCall& c) {
    std::string key = c.op + '/' + c.dtype + '/' + c.reduction;
    for (int64_t number : {int64_t(c.communicator), c.elements_in, c.elements_out, c.peer, int64_t(c.splits_in.size())})
      add(key, number);
    for (const auto* splits : {&c.splits_in, &c.splits_out})
      for (int64_t size : *splits) add(key, size);
    auto found = calls_.find(key);
    if (found == calls_.end()) {
      auto number = side_.attr("call")(c.communicator, c.op, c.dtype, c.elements_in, c.elements_out, c.peer,
                                       c.reduction, c.splits_in, c.splits_out);
      found = calls_.emplace(std::move(key), number.cast<uint32_t>()).first;
    }
    return found->second;
  }
  int64_t site_of(const std::vector<std::pair<PyCodeObject*, int>>& stack) {
    std::string key;
    key.reserve(stack.size() * 2 * sizeof(int64_t));
    for (auto [code, instruction] : stack) add(key, reinterpret_cast<int64_t>(code)), add(key, instruction);
    auto found = sites_.find(key);
    if (found == sites_.end()) {
      py::tuple frames(stack.size());  // keeps the code objects alive, so that no other gets their address
      for (size_t i = 0; i < stack.size(); i++)
        frames[i] = py::make_tuple(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(stack[i].first)),
                                   stack[i].second);
      found = sites_.emplace(std::move(key), side_.attr("site")(frames).cast<int64_t>()).first;
    }
    return found->second;
  }
  static void add(std::string& key, int64_t number) {
    key.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  py::object side_;
  std::unordered_map<std::string, uint32_t> calls_;
  std::unordered_map<std::string, int64_t> sites_;
};

std::unique_ptr<PythonCollectives>& side() {
  static auto* instance = new std::unique_ptr<PythonCollectives>;
  return *instance;
}
PythonCollectives& python() {
  TORCH_CHECK(side(), "this process group belongs to an emulation that has ended");
  return *side();
}

c10::Stream device_stream(int device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), id);
}

bool exchanged(const Tensor& tensor) {
  return tensor.defined() && (!tensor.is_cuda() || tensor.numel() <= exchange_limit(tensor.scalar_type()));
}

int64_t elements(const Tensors& tensors) {
  return std::accumulate(tensors.begin(), tensors.end(), int64_t(0), [](int64_t sum, const Tensor& tensor) {
    return sum + (tensor.defined() ? tensor.numel() : 0);
  });
}

std::vector<int64_t> sizes_of(const Tensors& tensors) {
  std::vector<int64_t> sizes;
  for (const auto& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

// Split sizes are in rows; NCCL counts elements.
std::vector<int64_t> in_elements(const std::vector<int64_t>& rows, const Tensor& tensor) {
  if (rows.empty()) return {};
  const int64_t row = tensor.size(0) ? tensor.numel() / tensor.size(0) : 1;
  std::vector<int64_t> result;
  for (auto count : rows) result.push_back(count * row);
  return result;
}

const char* reduction_name(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "avg";
    case c10d::ReduceOp::PRODUCT: return "product";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::MAX: return "max";
    case c10d::ReduceOp::BAND: return "band";
    case c10d::ReduceOp::BOR: return "bor";
    case c10d::ReduceOp::BXOR: return "bxor";
    case c10d::ReduceOp::PREMUL_SUM: return "premul_sum";
    default: return "unknown";
  }
}

// Whether a group of one rank does this op as a copy, without NCCL.
bool copied_alone(const std::string& op) {
  return op.starts_with("reduce_scatter") || op == "gather" || op == "scatter";
}

bool same_sizes(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const Tensor& one) { return one.is_same_size(tensors[0]); });
}

Tensor stacked_like(const Tensors& tensors) {
  auto sizes = tensors[0].sizes().vec();
  sizes.insert(sizes.begin(), tensors.size());
  return at::empty(sizes, tensors[0].options());
}

// Tensors in flight. They are released when the work is waited for, or by the next call if the work no longer exists.
using Shelf = std::vector<Tensor>;

struct Work final : c10d::Work {
  Work(int rank, OpType op, uint64_t number) : c10d::Work(rank, op), sequence(number) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs; }
  uint64_t getSequencenumber() const override { return sequence; }
  float getDuration() const override { return 0; }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  void abort() override {}
  bool wait(std::chrono::milliseconds timeout) override {
    if (device >= 0) {
      auto current = device_stream(device, current_stream(device));
      end.block(current);
      shelf->clear();
      if (host_waits || timeout != kNoTimeout) synchronize_stream(device, current.id());
    }
    settle_values();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    settle_values();
    return future;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    result->markCompleted(c10::IValue(int64_t(c10d::WorkResult::SUCCESS)));
    return result;
  }
  void settle_values() {
    auto settle = std::exchange(settle_, {});
    for (auto& one : settle) one();
  }
  // A future of device tensors carries an event of the stream on which it completes.
  void complete() {
    const auto type = c10::ListType::create(c10::TensorType::get());
    if (device < 0) {
      future = c10::make_intrusive<c10::ivalue::Future>(type);
    } else {
      future = c10::make_intrusive<c10::ivalue::Future>(
          type, std::vector<c10::Device>{c10::Device(c10::DeviceType::CUDA, device)});
    }
    future->markCompleted(c10::IValue(outputs));
  }

  uint64_t sequence;
  int device = -1;  // -1: on the host
  bool host_waits = false;
  c10::Event end{c10::DeviceType::CUDA};
  std::shared_ptr<Shelf> shelf = std::make_shared<Shelf>();
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<Settle> settle_;
};

struct NcclOptions : c10d::Backend::Options {
  explicit NcclOptions(bool high_priority = false)
      : Options("nccl", std::chrono::minutes(10)), is_high_priority_stream(high_priority) {}
  bool is_high_priority_stream;
  int64_t split_color = 0;
};
struct GlooOptions : c10d::Backend::Options {
  GlooOptions() : Options("gloo", std::chrono::minutes(30)) {}
};

class Communicator : public c10d::Backend {
 public:
  Communicator(int rank, int size, c10::intrusive_ptr<Options> options)
      : Backend(rank, size), options_(std::move(options)) {}

  const std::string getBackendName() const override { return options_->backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool host_only() const { return options_->backend == "gloo"; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return !host_only(); }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  void waitForPendingWorks() override {}
  void enableCollectivesTiming() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  void eagerConnectSingleDevice(at::Device device) override {
    eager_ = true;
    OnDevice on(device.index());
    channel(std::to_string(device.index()), device.index());
  }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    splits_++;
    const auto mine = std::find(ranks.begin(), ranks.end(), getRank());
    if (mine == ranks.end()) return nullptr;
    auto child = make_child(int(mine - ranks.begin()), int(ranks.size()));
    if (options) child->options_->timeout = options->timeout, child->options_->group_name = options->group_name;
    const auto all = global_ranks();
    for (auto one : ranks) child->options_->global_ranks_in_group.push_back(all[one]);
    if (auto device = getBoundDeviceId(); device && !host_only()) {
      child->setBoundDeviceId(device);
      child->eagerConnectSingleDevice(*device);
    }
    return child;
  }
  uint64_t split_count() const { return splits_; }

  // ---- collectives ----
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& o) override {
    auto tensor = one(tensors, reduction_name(o.reduceOp));
    return collective(OpType::ALLREDUCE, call("all_reduce", tensor, -1, o.reduceOp), {tensor}, {tensor}, o.asyncOp);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& o) override {
    return coalesced(tensors, tensors, o.asyncOp,
                     [&](Tensor& in, Tensor&) { return call("all_reduce", in, -1, o.reduceOp); });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& o) override {
    auto tensor = one(tensors);
    return collective(OpType::BROADCAST, call("broadcast", tensor, o.rootRank + o.rootTensor), {tensor}, {tensor},
                      o.asyncOp);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& o) override {
    auto tensor = one(tensors, reduction_name(o.reduceOp));
    return collective(OpType::REDUCE, call("reduce", tensor, o.rootRank + o.rootTensor, o.reduceOp), {tensor}, {tensor},
                      o.asyncOp);
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    auto input = one(inputs);
    auto& to = outputs.at(0);
    TORCH_CHECK_VALUE(int(to.size()) == getSize(), "all_gather: ", to.size(), " output tensors for a group of ",
                      getSize());
    if (host_only() || !input.is_cuda())
      return collective(OpType::ALLGATHER, gathered("all_gather", input, to), {input}, to, o.asyncOp);
    if (!same_sizes(to)) {  // one broadcast from each rank, as one group
      startCoalescing();
      for (int64_t source = 0; source < int64_t(to.size()); source++) {
        auto from = source == getRank() ? input : to[source];
        collective(OpType::BROADCAST, call("broadcast", to[source], source), {from}, {to[source]}, o.asyncOp);
      }
      return end_coalescing(OpType::ALLGATHER);
    }
    input = input.contiguous();
    Flat flat{stacked_like(to), /*of_outputs=*/true};
    return collective(OpType::ALLGATHER, gathered("all_gather", input, to), {input}, to, o.asyncOp, &flat);
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& o) override {
    check(input), check(output);
    TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "output tensor must have the same type as input tensor");
    TORCH_CHECK_VALUE(input.numel() * getSize() == output.numel(),
                      "output tensor size must be equal to world_size times input tensor size");
    return collective(OpType::_ALLGATHER_BASE, sized("all_gather_into_tensor", input, output), {input}, {output},
                      o.asyncOp);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& o) override {
    return coalesced(inputs, outputs, o.asyncOp,
                     [&](Tensor& in, Tensor& out) { return sized("all_gather_into_tensor", in, out); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& o) override {
    TORCH_CHECK_NOT_IMPLEMENTED(host_only(), "ProcessGroupNCCL does not support allgather_coalesced");
    WorkPtr last;
    for (size_t i = 0; i < inputs.size(); i++) {
      Tensors to;
      for (auto& list : outputs) to.push_back(list[i]);
      last = collective(OpType::ALLGATHER, gathered("all_gather", inputs[i], to), {inputs[i]}, to, o.asyncOp);
    }
    return last;
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& o) override {
    auto output = one(outputs, reduction_name(o.reduceOp));
    auto& from = inputs.at(0);
    TORCH_CHECK_VALUE(int(from.size()) == getSize(), "reduce_scatter: ", from.size(), " input tensors for a group of ",
                      getSize());
    auto made = call("reduce_scatter", output, -1, o.reduceOp);
    made.elements_in = elements(from);
    if (host_only() || !output.is_cuda()) return collective(OpType::REDUCE_SCATTER, made, from, {output}, o.asyncOp);
    if (!same_sizes(from)) {
      startCoalescing();
      for (int64_t root = 0; root < int64_t(from.size()); root++) {
        auto to = root == getRank() ? output : from[root];
        collective(OpType::REDUCE, call("reduce", from[root], root, o.reduceOp), {from[root]}, {to}, o.asyncOp);
      }
      return end_coalescing(OpType::REDUCE_SCATTER);
    }
    Flat flat{stacked_like(from), /*of_outputs=*/false};
    return collective(OpType::REDUCE_SCATTER, made, from, {output}, o.asyncOp, &flat);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK_TYPE(input.dtype() == output.dtype(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK_VALUE(input.numel() == output.numel() * getSize(),
                      "input tensor must be the same size as output size times world size");
    check_reducible(output, reduction_name(o.reduceOp));
    return collective(OpType::_REDUCE_SCATTER_BASE, sized("reduce_scatter_tensor", input, output, o.reduceOp), {input},
                      {output}, o.asyncOp);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& o) override {
    return coalesced(inputs, outputs, o.asyncOp,
                     [&](Tensor& in, Tensor& out) { return sized("reduce_scatter_tensor", in, out, o.reduceOp); });
  }
  WorkPtr alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& o) override {
    check(output), check(input);
    auto made = sized("all_to_all", input, output);
    if (!out_splits.empty() || !in_splits.empty()) {
      c10d::checkSplitSizes(in_splits, input, getSize());
      c10d::checkSplitSizes(out_splits, output, getSize());
      made.splits_in = in_elements(in_splits, input);
      made.splits_out = in_elements(out_splits, output);
    } else {
      TORCH_CHECK_VALUE(input.numel() == output.numel() && input.scalar_type() == output.scalar_type(),
                        "Tensors are not equal in size or data type");
      TORCH_CHECK_VALUE(input.size(0) % getSize() == 0, "Tensor's dim 0 does not divide equally across group size");
    }
    return collective(OpType::ALLTOALL_BASE, made, {input}, {output}, o.asyncOp);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK_VALUE(int(outputs.size()) == getSize() && int(inputs.size()) == getSize(), "all_to_all: a group of ",
                      getSize(), " needs as many input and output tensors");
    for (auto& tensor : outputs) check(tensor);
    for (auto& tensor : inputs) check(tensor);
    auto made = call("all_to_all", inputs[0]);
    made.elements_in = elements(inputs), made.elements_out = elements(outputs);
    made.splits_in = sizes_of(inputs), made.splits_out = sizes_of(outputs);
    return collective(OpType::ALLTOALL, made, inputs, outputs, o.asyncOp);
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& o) override {
    auto input = one(inputs);
    const bool root = getRank() == o.rootRank;
    TORCH_CHECK_VALUE(root ? outputs.size() == 1 && int(outputs[0].size()) == getSize() : outputs.empty(),
                      "ProcessGroup::gather: the root needs one output tensor per rank, the others none");
    auto made = call("gather", input, o.rootRank);
    made.elements_out = root ? elements(outputs[0]) : 0;
    auto work = collective(OpType::GATHER, made, {input}, root ? outputs[0] : Tensors(), o.asyncOp);
    if (root && !host_only())
      outputs[0][getRank()].copy_(input);  // the root's own part is a copy on the current stream
    return work;
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& o) override {
    auto output = one(outputs);
    const bool root = getRank() == o.rootRank;
    TORCH_CHECK_VALUE(root ? inputs.size() == 1 && int(inputs[0].size()) == getSize() : inputs.empty(),
                      "ProcessGroup::scatter: the root needs one input tensor per rank, the others none");
    auto made = call("scatter", output, o.rootRank);
    made.elements_in = root ? elements(inputs[0]) : 0;
    auto work = collective(OpType::SCATTER, made, root ? inputs[0] : Tensors(), {output}, o.asyncOp);
    if (root && !host_only()) output.copy_(inputs[0][getRank()]);
    return work;
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    if (host_only()) return collective(OpType::BARRIER, call("barrier", Tensor()), {}, {}, o.asyncOp);
    const int device = o.device_ids.empty() ? guess_device() : int(o.device_ids[0]);
    OnDevice on(device);
    auto token =
        at::zeros({1}, at::TensorOptions().device(c10::Device(c10::DeviceType::CUDA, device)).dtype(at::kFloat));
    auto work =
        collective(OpType::BARRIER, call("barrier", token, -1, c10d::ReduceOp::SUM), {token}, {token}, o.asyncOp);
    if (work) static_cast<Work&>(*work).host_waits = true;
    else synchronize_stream(device, current_stream(device));
    return work;
  }
  void monitoredBarrier(const c10d::BarrierOptions& o, bool) override { barrier(o); }

  // ---- point to point ----
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return point_to_point(OpType::SEND, "send", tensors, to, tag);
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return point_to_point(OpType::RECV, "recv", tensors, from, tag);
  }

  void startCoalescing() override {
    TORCH_CHECK(!host_only(), "Backend gloo does not implement startCoalescing");
    coalescing_ = Coalescing{};
  }
  WorkPtr endCoalescing() override { return end_coalescing(OpType::COALESCED); }
  void group_start() { group_depth_++; }
  void group_end() { group_depth_--; }

 protected:
  virtual c10::intrusive_ptr<Communicator> make_child(int rank, int size) const = 0;
  c10::intrusive_ptr<Options> options_;

 private:
  // A stream of the communicator, and the event with which it waits for the program's stream.
  struct Channel {
    c10::Stream stream;
    c10::Event ready{c10::DeviceType::CUDA};
  };
  struct Coalescing {
    std::optional<c10::Stream> stream;
    int device = -1;
    bool async = false;
    bool holds_group = false;  // contains only a group with its own begin, end and work
    Shelf shelf;
    std::vector<Settle> settle;
    std::vector<std::function<Settle()>> receives;  // called once every send is posted
  };

  std::vector<int64_t> global_ranks() const {
    std::vector<int64_t> ranks(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
    if (ranks.empty()) {  // the default group does not list its ranks
      ranks.resize(getSize());
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    return ranks;
  }
  uint32_t number() {
    if (!number_) number_ = python().communicator(options_->backend, group_name(), global_ranks(), getRank());
    return *number_;
  }
  const std::string& group_name() const { return options_->group_name.empty() ? getGroupUid() : options_->group_name; }
  uint32_t pair_number(const std::string& pair, int peer) {
    auto [found, inserted] = pairs_.try_emplace(pair, 0);
    if (inserted) {
      const auto all = global_ranks();
      const std::vector<int64_t> ranks{all[std::min(getRank(), peer)], all[std::max(getRank(), peer)]};
      found->second = python().communicator(options_->backend, group_name() + ":" + pair, ranks, getRank() > peer);
    }
    return found->second;
  }
  Channel& channel(const std::string& key, int device) {
    std::lock_guard lock(mutex_);
    auto found = channels_.find(key);
    if (found == channels_.end()) {
      const bool high = static_cast<NcclOptions&>(*options_).is_high_priority_stream;
      found = channels_.emplace(key, Channel{device_stream(device, stream_from_pool(device, high ? -1 : 0))}).first;
      used_devices_.push_back(device);
    }
    return found->second;
  }
  int guess_device() const {
    if (auto bound = getBoundDeviceId()) return bound->index();
    if (!used_devices_.empty()) return used_devices_.front();
    return global_ranks()[getRank()] % config().count;
  }

  void check(const Tensor& tensor, bool point_to_point = false) const {
    if (host_only()) {
      TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "gloo: tensors must be dense");
      return;
    }
    TORCH_CHECK_VALUE(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense");
    if (tensor.is_contiguous(tensor.suggest_memory_format())) return;
    TORCH_CHECK_VALUE(point_to_point, "Tensors must be contiguous");
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors for P2P must be non-overlapping and dense");
  }
  void check_reducible(const Tensor& tensor, const std::string& reduction) const {
    if (host_only()) return;
    TORCH_CHECK_VALUE(reduction[0] != 'b', "Cannot use ReduceOp.", reduction, " with NCCL");
    TORCH_CHECK_TYPE(!(tensor.scalar_type() == at::kBool && reduction == "avg"),
                     "Cannot use ReduceOp.AVG with boolean inputs");
  }
  Tensor one(Tensors& tensors, const char* reduction = nullptr) const {
    TORCH_CHECK(tensors.size() == 1,
                "Expecting one tensor only but got multiple. Multiple devices per process are not supported.");
    auto tensor = tensors[0];
    TORCH_CHECK(!(reduction && tensor.is_sparse() && !host_only()),
                "NCCL does not support all_reduce with sparse tensors. Please use dense tensors instead.");
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
    check(tensor);
    if (reduction) check_reducible(tensor, reduction);
    return tensor;
  }

  CollectiveCall call(const char* op, const Tensor& tensor, int64_t peer = -1,
                      std::optional<c10d::ReduceOp> reduction = {}) {
    CollectiveCall made;
    made.communicator = number();
    made.op = op;
    if (tensor.defined()) made.dtype = c10::toString(tensor.scalar_type());
    made.elements_in = made.elements_out = tensor.defined() ? tensor.numel() : 0;
    made.peer = peer;
    if (reduction) made.reduction = reduction_name(*reduction);
    return made;
  }
  CollectiveCall sized(const char* op, const Tensor& input, const Tensor& output,
                       std::optional<c10d::ReduceOp> reduction = {}) {
    auto made = call(op, input, -1, reduction);
    made.elements_out = output.numel();
    return made;
  }
  CollectiveCall gathered(const char* op, const Tensor& input, const Tensors& outputs) {
    auto made = call(op, input);
    made.elements_out = elements(outputs);
    if (!same_sizes(outputs)) made.splits_out = sizes_of(outputs);
    return made;
  }

  void record(const CollectiveCall& made, int device, c10::StreamId stream, int64_t sequence) {
    const auto [row, site] = python().note(made);
    if (timing() && device >= 0 && !capturing()) time_collective(device, stream, row);
    recorder().add(EventKind::Collective, std::max(device, 0), stream, row, sequence, site, device < 0 ? kOnHost : 0);
  }

  // Values are known at once after a blocking call, and after the wait otherwise.
  Settle values(const CollectiveCall& made, int64_t sequence, const Tensors& inputs, const Tensors& outputs) {
    // The amounts of an uneven exchange differ by rank, so they must not decide whether values are exchanged.
    const bool uneven = !made.splits_in.empty() && c10::isIntegralType(inputs[0].scalar_type(), true);
    const bool worth = uneven || std::any_of(inputs.begin(), inputs.end(), exchanged) ||
                       std::any_of(outputs.begin(), outputs.end(), exchanged);
    if (worth) return python().exchange(made, sequence, inputs, outputs);
    for (const auto& output : outputs)
      if (output.defined() && output.is_cuda()) forget(output);
    return {};
  }

  // Releases tensors of works that nobody will wait for: in ProcessGroupNCCL the watchdog has seen them complete.
  void release_finished() {
    std::vector<std::shared_ptr<Shelf>> done;  // destroyed after the lock is released: tensors may hold Python objects
    std::lock_guard lock(mutex_);
    for (auto& shelf : in_flight_)
      if (shelf.use_count() == 1 || shelf->empty()) done.push_back(std::move(shelf));
    std::erase(in_flight_, nullptr);
  }

  // A list of tensors is transferred through one tensor that holds them all, copied on the communicator's stream.
  struct Flat {
    Tensor tensor;
    bool of_outputs;
  };

  WorkPtr collective(OpType op, CollectiveCall made, Tensors inputs, Tensors outputs, bool async,
                     const Flat* flat = nullptr) {
    const Tensor& any = inputs.empty() || !inputs[0].defined() ? (outputs.empty() ? Tensor() : outputs[0]) : inputs[0];
    const int64_t sequence = collectives_++;
    if (!any.defined() || !any.is_cuda()) return on_host(op, made, sequence, inputs, outputs);
    const int device = any.get_device();
    OnDevice on(device);
    auto& own = channel(std::to_string(device), device);
    const auto stream = async ? own.stream : device_stream(device, current_stream(device));
    if (async) {
      own.ready.record(device_stream(device, current_stream(device)));
      own.ready.block(stream);
    }
    auto work = c10::make_intrusive<Work>(getRank(), op, sequence);
    work->device = device;
    const Tensors given = flat && !flat->of_outputs ? Tensors{flat->tensor} : inputs;
    work->outputs = flat && flat->of_outputs ? Tensors{flat->tensor} : outputs;
    auto& shelf = coalescing_ ? coalescing_->shelf : *work->shelf;
    if (async) {
      shelf.insert(shelf.end(), given.begin(), given.end());
      shelf.insert(shelf.end(), work->outputs.begin(), work->outputs.end());
      if (flat)
        for (const auto& tensor : flat->of_outputs ? outputs : inputs) shelf.push_back(tensor);
    }
    c10::StreamGuard on_stream(stream);
    if (flat && !flat->of_outputs)
      for (size_t i = 0; i < inputs.size(); i++) flat->tensor[i].copy_(inputs[i], true);
    join_group(stream, device, async);
    if (getSize() > 1 || !copied_alone(made.op)) record(made, device, stream.id(), sequence);
    else if (made.op.starts_with("reduce_scatter")) outputs[0].flatten().copy_(given[0].flatten(), true);
    if (flat && flat->of_outputs)
      for (size_t i = 0; i < outputs.size(); i++) outputs[i].copy_(flat->tensor[i], true);
    auto settle = values(made, sequence, inputs, outputs);
    if (coalescing_) {
      if (settle) coalescing_->settle.push_back(std::move(settle));
      work->complete();
      return async ? work : nullptr;
    }
    if (!async) {
      release_finished();
      if (settle) settle();
      return nullptr;
    }
    if (settle) work->settle_.push_back(std::move(settle));
    work->end.record(stream);
    work->complete();
    release_finished();
    std::lock_guard lock(mutex_);
    in_flight_.push_back(work->shelf);
    return work;
  }

  template <class MakeCall>
  WorkPtr coalesced(Tensors& inputs, Tensors& outputs, bool async, MakeCall make_call) {
    TORCH_CHECK_VALUE(!inputs.empty(), "Tensor list must be nonempty");
    if (host_only()) {
      WorkPtr last;
      for (size_t i = 0; i < inputs.size(); i++)
        last = collective(OpType::COALESCED, make_call(inputs[i], outputs[i]), {inputs[i]}, {outputs[i]}, async);
      return last;
    }
    auto around = std::exchange(coalescing_, Coalescing{});
    for (size_t i = 0; i < inputs.size(); i++)
      collective(OpType::COALESCED, make_call(inputs[i], outputs[i]), {inputs[i]}, {outputs[i]}, async);
    const auto stream = coalescing_->stream;
    const int device = coalescing_->device;
    auto work = end_coalescing(OpType::COALESCED, outputs);
    if (around && !around->stream) {
      around->stream = stream;
      around->device = device;
      around->async = async;
      around->holds_group = true;
    }
    coalescing_ = std::move(around);
    return work;
  }

  void join_group(const c10::Stream& stream, int device, bool async) {
    if (!coalescing_) return;
    coalescing_->async = async;
    if (coalescing_->stream) return;
    coalescing_->stream = stream;
    coalescing_->device = device;
    recorder().add(EventKind::GroupBegin, device, stream.id(), number());
  }

  WorkPtr end_coalescing(OpType op, Tensors outputs = {}) {
    auto group = std::exchange(coalescing_, std::nullopt);
    if (!group || !group->stream) return nullptr;
    if (!group->holds_group) recorder().add(EventKind::GroupEnd, group->device, group->stream->id(), number());
    for (auto& receive : group->receives)
      if (auto settle = receive()) group->settle.push_back(std::move(settle));
    if (!group->holds_group) release_finished();
    if (!group->async) {
      for (auto& settle : group->settle) settle();
      return nullptr;
    }
    auto work = c10::make_intrusive<Work>(getRank(), op, collectives_);
    work->device = group->device;
    *work->shelf = std::move(group->shelf);
    work->settle_ = std::move(group->settle);
    work->outputs = std::move(outputs);
    c10::StreamGuard on_stream(*group->stream);
    work->end.record(*group->stream);
    work->complete();
    std::lock_guard lock(mutex_);
    in_flight_.push_back(work->shelf);
    return work;
  }

  WorkPtr on_host(OpType op, const CollectiveCall& made, int64_t sequence, const Tensors& inputs,
                  const Tensors& outputs) {
    record(made, -1, 0, sequence);
    auto settle = values(made, sequence, inputs, outputs);
    auto work = c10::make_intrusive<Work>(getRank(), op, sequence);
    work->outputs = outputs;
    if (settle) work->settle_.push_back(std::move(settle));
    work->complete();
    return work;
  }

  WorkPtr point_to_point(OpType op, const char* name, Tensors& tensors, int peer, int tag) {
    TORCH_CHECK(tensors.size() == 1,
                "Expecting one tensor only but got multiple. Multiple devices per process are not supported.");
    auto tensor = tensors[0];
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
    check(tensor, true);
    TORCH_CHECK_VALUE(peer >= 0 && peer < getSize(), "Invalid rank ", peer, " for a group of ", getSize());
    auto made = call(name, tensor, peer);
    const bool sending = op == OpType::SEND;
    // Outside a batch, a lazily connected communicator creates another one for each pair of ranks.
    const bool paired = !host_only() && !eager_ && !coalescing_ && group_depth_ == 0;
    const auto pair = std::to_string(std::min(getRank(), peer)) + ":" + std::to_string(std::max(getRank(), peer));
    if (paired && peer != getRank()) {
      made.communicator = pair_number(pair, peer);
      made.peer = peer > getRank();
    }
    // NCCL ignores tags; gloo matches messages by them.
    const int64_t sequence = (sending ? sent_ : received_)[{made.communicator, peer, host_only() ? tag : 0}]++ +
                             (host_only() ? int64_t(tag) << 32 : 0);
    python().meet(global_ranks()[peer]);
    const Tensors in = sending ? Tensors{tensor} : Tensors(), out = sending ? Tensors() : Tensors{tensor};
    if (!tensor.is_cuda()) return on_host(op, made, sequence, in, out);
    const int device = tensor.get_device();
    OnDevice on(device);
    auto& own = channel(paired ? pair : std::to_string(device), device);
    own.ready.record(device_stream(device, current_stream(device)));
    own.ready.block(own.stream);
    allocator_record_stream(tensor, own.stream.id());
    join_group(own.stream, device, true);
    record(made, device, own.stream.id(), sequence);
    if (coalescing_) {
      if (sending) values(made, sequence, in, out);
      else coalescing_->receives.push_back([=, this] { return values(made, sequence, in, out); });
      return nullptr;
    }
    auto settle = values(made, sequence, in, out);
    auto work = c10::make_intrusive<Work>(getRank(), op, sequence);
    work->device = device;
    work->outputs = {tensor};
    if (settle) work->settle_.push_back(std::move(settle));
    c10::StreamGuard on_stream(own.stream);
    work->end.record(own.stream);
    work->complete();
    release_finished();
    return work;
  }

  static void allocator_record_stream(const Tensor& tensor, c10::StreamId stream) {
    if (auto* allocation = allocation_of(tensor.unsafeGetTensorImpl()))
      allocation->allocator->record_stream(allocation->block, stream);
  }

  std::optional<uint32_t> number_;
  std::mutex mutex_;
  std::map<std::string, Channel> channels_;
  std::vector<int> used_devices_;
  std::vector<std::shared_ptr<Shelf>> in_flight_;
  std::optional<Coalescing> coalescing_;
  int group_depth_ = 0;
  bool eager_ = false;
  int64_t collectives_ = 0;
  std::map<std::tuple<uint32_t, int, int>, int64_t> sent_, received_;  // by communicator, peer and tag
  std::map<std::string, uint32_t> pairs_;
  uint64_t splits_ = 0;
};

struct NcclCommunicator final : Communicator {
  using Communicator::Communicator;
  c10::intrusive_ptr<Communicator> make_child(int rank, int size) const override {
    return c10::make_intrusive<NcclCommunicator>(
        rank, size, c10::make_intrusive<NcclOptions>(static_cast<NcclOptions&>(*options_).is_high_priority_stream));
  }
};
struct GlooCommunicator final : Communicator {
  using Communicator::Communicator;
  c10::intrusive_ptr<Communicator> make_child(int rank, int size) const override {
    return c10::make_intrusive<GlooCommunicator>(rank, size, c10::make_intrusive<GlooOptions>());
  }
};

// DDP times its buckets with a timer for each device type, and asserts that there is one.
struct DeviceTimer final : c10d::Timer {
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

template <class T>
using Ptr = c10::intrusive_ptr<T>;

}  // namespace

void bind_collectives(py::module_& m) {
  py::module_::import("torch._C._distributed_c10d");
  m.def("set_collectives", [](py::object made) {
    side() = made.is_none() ? nullptr : std::make_unique<PythonCollectives>(std::move(made));
  });
  m.def("forget_collective_calls", [] {
    if (side()) side()->forget_calls();
  });

  auto nccl =
      py::class_<NcclCommunicator, c10d::Backend, Ptr<NcclCommunicator>>(m, "ProcessGroupNCCL", py::dynamic_attr());
  py::class_<NcclOptions, c10d::Backend::Options, Ptr<NcclOptions>>(nccl, "Options", py::dynamic_attr())
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream)
      .def_readwrite("split_color", &NcclOptions::split_color)
      .def("__copy__", [](const NcclOptions& self) { return c10::make_intrusive<NcclOptions>(self); })
      .def("__deepcopy__",
           [](const NcclOptions& self, const py::dict&) { return c10::make_intrusive<NcclOptions>(self); });
  // Since torch 2.14 there are further classes, whose constructors are also told the device
  // (torch_seam/distributed.py).
  nccl.def(py::init([](py::object, int rank, int size, Ptr<NcclOptions> options, std::optional<at::Device> device) {
             auto made = c10::make_intrusive<NcclCommunicator>(rank, size, std::move(options));
             if (device) made->setBoundDeviceId(device);
             return made;
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("device") = std::nullopt)
      .def(py::init([](py::object, int rank, int size, std::chrono::milliseconds timeout) {
             auto options = c10::make_intrusive<NcclOptions>();
             options->timeout = timeout;
             return c10::make_intrusive<NcclCommunicator>(rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout") = std::chrono::milliseconds(std::chrono::minutes(10)))
      .def_property_readonly("options",
                             [](NcclCommunicator& self) {
                               return c10::static_intrusive_pointer_cast<NcclOptions>(self.getBackendOptions());
                             })
      .def_property(
          "bound_device_id", [](NcclCommunicator& self) { return self.getBoundDeviceId(); },
          [](NcclCommunicator& self, std::optional<at::Device> device) { self.setBoundDeviceId(device); })
      .def_property_readonly("uid", [](NcclCommunicator& self) { return self.getID(); })
      .def("comm_split_count", &NcclCommunicator::split_count)
      .def("perform_nocolor_split", [](NcclCommunicator&, at::Device) {})
      .def("get_error", &NcclCommunicator::getError)
      .def("_group_start", &NcclCommunicator::group_start)
      .def("_group_end", &NcclCommunicator::group_end)
      .def("_set_default_timeout", &NcclCommunicator::setTimeout)
      .def("_add_ephemeral_timeout", [](NcclCommunicator&, std::chrono::milliseconds) {})
      .def("_verify_work_timeout", [](NcclCommunicator&, const WorkPtr&, std::chrono::milliseconds) { return true; })
      .def("_set_enable_nan_check", [](NcclCommunicator&, bool) {})
      .def("_is_initialized", [](NcclCommunicator&) { return true; })
      .def(
          "register_mem_pool", [](NcclCommunicator&, py::object, bool) {}, py::arg("pool"), py::arg("symm") = false)
      .def("deregister_mem_pool", [](NcclCommunicator&, py::object) {});

  auto gloo =
      py::class_<GlooCommunicator, c10d::Backend, Ptr<GlooCommunicator>>(m, "ProcessGroupGloo", py::dynamic_attr());
  py::class_<GlooOptions, c10d::Backend::Options, Ptr<GlooOptions>>(gloo, "_Options", py::dynamic_attr())
      .def(py::init<>());
  gloo.def(py::init([](py::object, int rank, int size, std::chrono::milliseconds timeout) {
             auto options = c10::make_intrusive<GlooOptions>();
             options->timeout = timeout;
             return c10::make_intrusive<GlooCommunicator>(rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("timeout") = std::chrono::milliseconds(std::chrono::minutes(30)))
      .def(py::init([](py::object, int rank, int size, Ptr<GlooOptions> options) {
             return c10::make_intrusive<GlooCommunicator>(rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
      .def_property_readonly("options",
                             [](GlooCommunicator& self) {
                               return c10::static_intrusive_pointer_cast<GlooOptions>(self.getBackendOptions());
                             })
      .def("_set_default_timeout", &GlooCommunicator::setTimeout)
      .def_static("create_device", [](py::args, py::kwargs) { return py::none(); })
      .def_static("create_default_device", [](py::args, py::kwargs) { return py::none(); });
}

}  // namespace maya

namespace c10d {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, maya::DeviceTimer)
}
