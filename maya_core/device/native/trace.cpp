#include "trace.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/node.h>

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

// Autograd numbers the nodes of a thread as they are made, so the module of a backward op is that of the forward op
// whose node bears the same number. One row per forward thread, one column per number.
struct ForwardModules {
  std::shared_mutex mutex;
  std::unordered_map<uint64_t, std::vector<uint32_t>> by_thread;
};
ForwardModules& forward_modules() {
  static auto* modules = new ForwardModules;
  return *modules;
}
thread_local uint64_t noted_until = 0;

void note_forward_module(uint32_t module) {
  const uint64_t made = at::sequence_number::peek();
  if (made == noted_until) return;
  auto& forward = forward_modules();
  std::unique_lock lock(forward.mutex);
  auto& row = forward.by_thread[at::RecordFunction::currentThreadId()];
  row.resize(made, module);  // numbers handed out since the last op belong to this one
  noted_until = made;
}

uint32_t module_of_backward(const torch::autograd::Node& node) {
  auto& forward = forward_modules();
  std::shared_lock lock(forward.mutex);
  auto row = forward.by_thread.find(node.thread_id());
  if (row == forward.by_thread.end() || node.sequence_nr() >= row->second.size()) return 0;
  return row->second[node.sequence_nr()];
}

struct Place { uint32_t module; Phase phase; };

Place place() {
  if (optimizer_depth > 0) return {current_module(), Phase::Optimizer};
  auto node = torch::autograd::get_current_node();
  if (!node) {
    note_forward_module(current_module());
    return {current_module(), Phase::Forward};
  }
  // A module's forward inside backward is activation checkpointing at work.
  if (!module_stack.empty() && at::GradMode::is_enabled()) {
    note_forward_module(current_module());
    return {current_module(), Phase::Recompute};
  }
  return {module_of_backward(*node), Phase::Backward};
}

}  // namespace

Recorder& recorder() {
  static auto* instance = new Recorder;
  return *instance;
}

int64_t Recorder::now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count() - start_ns_;
}

void Recorder::start() {
  std::lock_guard lock(mutex_);
  forget_modules();
  events_.clear();
  streams_.clear();
  start_ns_ = 0;
  start_ns_ = now();
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
  const bool anywhere = kind == EventKind::Free || kind == EventKind::SegmentAlloc || kind == EventKind::SegmentFree || kind == EventKind::Label;
  const Place where = anywhere ? Place{0, Phase::Forward} : place();
  std::lock_guard lock(mutex_);
  events_.push_back({now(), a, b, subject, where.module, stream_number(device, stream), uint8_t(kind), uint8_t(where.phase),
                     uint8_t(device), uint8_t(this_thread), flags});
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
    return kind == EventKind::Op || kind == EventKind::EventRecord || kind == EventKind::EventWait || kind == EventKind::Collective ||
        kind == EventKind::GroupBegin || kind == EventKind::GroupEnd;
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

void enter_module(uint32_t module) { module_stack.push_back(module); }
void leave_module() { if (!module_stack.empty()) module_stack.pop_back(); }
uint32_t current_module() { return module_stack.empty() ? 0 : module_stack.back(); }
std::pair<uint32_t, Phase> current_place() {
  const Place where = place();
  return {where.module, where.phase};
}
void enter_optimizer() { optimizer_depth++; }
void leave_optimizer() { optimizer_depth--; }

void forget_modules() {
  auto& forward = forward_modules();
  std::unique_lock lock(forward.mutex);
  forward.by_thread.clear();
}

}  // namespace maya
