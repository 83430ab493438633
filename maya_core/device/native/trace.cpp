#include "trace.h"

#include "device.h"
#include "lines.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <shared_mutex>
#include <unordered_map>

namespace maya {
namespace {

std::atomic<uint32_t> next_thread{0};
thread_local uint32_t this_thread = next_thread++;
thread_local std::vector<uint32_t> module_stack;
thread_local int optimizer_depth = 0;
thread_local std::vector<std::vector<uint32_t>>
    done_aside;  // numbers of the calls that were made, one list for each nested block

// Autograd numbers the nodes of a thread in order, so the module and line of a backward op are those of the forward op
// whose node has the same number. One row for each forward thread, one column for each number.
struct Origin {
  uint32_t module, line;
};
struct ForwardOrigins {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::vector<Origin>> by_thread;
};
ForwardOrigins& forward_origins() {
  static auto* origins = new ForwardOrigins;
  return *origins;
}
thread_local uint64_t noted_until = 0;
thread_local uint32_t last_line = 0;  // of this thread's last allocation
// Threads outlive recordings, and the line numbers of an earlier recording mean nothing in the next one.
std::atomic<uint32_t> recording{0};
thread_local uint32_t known_recording = 0;
void forget_if_earlier() {
  if (known_recording == recording) return;
  known_recording = recording;
  last_line = 0;
  noted_until = 0;
}

void note_forward(uint32_t module) {
  const uint64_t made = at::sequence_number::peek();
  if (made == noted_until) return;
  auto& forward = forward_origins();
  std::unique_lock lock(forward.mutex);
  auto& row = forward.by_thread[at::RecordFunction::currentThreadId()];
  row.resize(made, {module, last_line});  // numbers assigned since the last op belong to this one
  noted_until = made;
}

Origin origin_of_backward(const torch::autograd::Node& node) {
  auto& forward = forward_origins();
  std::shared_lock lock(forward.mutex);
  auto row = forward.by_thread.find(node.thread_id());
  if (row == forward.by_thread.end() || node.sequence_nr() >= row->second.size()) return {0, 0};
  return row->second[node.sequence_nr()];
}

struct Place {
  uint32_t module;
  Phase phase;
  uint32_t line;
};

// `line` is Python's current line, if it is known already.
Place place(uint32_t line) {
  if (optimizer_depth > 0) return {current_module(), Phase::Optimizer, line};
  auto node = torch::autograd::get_current_node();
  if (!node && torch::autograd::get_current_graph_task_id() >= 0)
    return {current_module(), Phase::Backward, line};  // a callback after all nodes: FSDP's last reduction
  if (!node) {
    note_forward(current_module());
    return {current_module(), Phase::Forward, line};
  }
  // A module's forward inside backward is activation checkpointing.
  if (!module_stack.empty() && at::GradMode::is_enabled()) {
    note_forward(current_module());
    return {current_module(), Phase::Recompute, line};
  }
  const Origin origin = origin_of_backward(*node);
  return {origin.module, Phase::Backward, origin.line};
}

}  // namespace

Recorder& recorder() {
  static auto* instance = new Recorder;
  return *instance;
}

namespace {

std::atomic<int64_t> own_ns{0};
thread_local int own_depth = 0;

int64_t clock_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

OwnTime::OwnTime() : begun_(own_depth++ ? 0 : clock_ns()) {}
OwnTime::~OwnTime() {
  if (!--own_depth) exclude_time(clock_ns() - begun_);
}
void exclude_time(int64_t nanoseconds) { own_ns += nanoseconds; }

int64_t Recorder::now() {
  // Another thread's own time may end between two events of this one.
  return latest_ns_ = std::max(latest_ns_, clock_ns() - own_ns - start_ns_);
}

void Recorder::start() {
  std::lock_guard lock(mutex_);
  forget_modules();
  forget_lines();
  recording++;
  events_.clear();
  streams_.clear();
  own_ns = 0;
  latest_ns_ = 0;
  start_ns_ = clock_ns();
  on_ = true;
}

uint16_t Recorder::stream_number(int device, int64_t stream) {
  for (size_t i = 0; i < streams_.size(); i++)
    if (streams_[i] == std::pair(device, stream)) return i;
  streams_.emplace_back(device, stream);
  return streams_.size() - 1;
}

void Recorder::add(EventKind kind, int device, int64_t stream, uint32_t subject, int64_t a, int64_t b, uint16_t flags) {
  if (!on()) return;
  const bool anywhere = kind == EventKind::Free || kind == EventKind::SegmentAlloc || kind == EventKind::SegmentFree ||
                        kind == EventKind::Label;
  if (!done_aside.empty() && !anywhere) {  // events of the program's own memory are still recorded
    if (kind == EventKind::Op) done_aside.back().push_back(subject);
    return;
  }
  forget_if_earlier();
  const bool allocates = kind == EventKind::Alloc;
  if (allocates) last_line = current_line();  // takes the GIL, so it must come before any of our locks
  const Place where = anywhere ? Place{0, Phase::Forward, 0} : place(last_line);
  if (allocates) subject = where.line;
  std::lock_guard lock(mutex_);
  events_.push_back({now(), a, b, subject, where.module, stream_number(device, stream), uint8_t(kind),
                     uint8_t(where.phase), uint8_t(device), uint8_t(this_thread), flags});
}

void Recorder::append(TraceEvent event) {
  if (!on()) return;
  std::lock_guard lock(mutex_);
  event.time_ns = now();
  event.flags |= kReplayed;
  events_.push_back(event);
}

size_t Recorder::size() {
  std::lock_guard lock(mutex_);
  return events_.size();
}

std::vector<TraceEvent> Recorder::take() {
  std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::vector<TraceEvent> Recorder::cut_work(size_t from) {
  std::lock_guard lock(mutex_);
  auto is_work = [](const TraceEvent& event) {
    const auto kind = EventKind(event.kind);
    return kind == EventKind::Op || kind == EventKind::EventRecord || kind == EventKind::EventWait ||
           kind == EventKind::Collective || kind == EventKind::GroupBegin || kind == EventKind::GroupEnd;
  };
  const auto first = events_.begin() + std::min(from, events_.size());
  std::vector<TraceEvent> work;
  std::copy_if(first, events_.end(), std::back_inserter(work), is_work);
  events_.erase(std::remove_if(first, events_.end(), is_work), events_.end());
  return work;
}

std::vector<std::pair<int, int64_t>> Recorder::streams() {
  std::lock_guard lock(mutex_);
  return streams_;
}

void begin_aside() { done_aside.emplace_back(); }
std::vector<uint32_t> end_aside() {
  auto done = std::move(done_aside.back());
  done_aside.pop_back();
  return done;
}
bool aside() { return !done_aside.empty(); }

void enter_module(uint32_t module) { module_stack.push_back(module); }
void leave_module() {
  if (!module_stack.empty()) module_stack.pop_back();
}
uint32_t current_module() { return module_stack.empty() ? 0 : module_stack.back(); }
std::pair<uint32_t, Phase> current_place() {
  const Place where = place(0);
  return {where.module, where.phase};
}
void enter_optimizer() { optimizer_depth++; }
void leave_optimizer() { optimizer_depth--; }

void forget_modules() {
  auto& forward = forward_origins();
  std::unique_lock lock(forward.mutex);
  forward.by_thread.clear();
}

}  // namespace maya
