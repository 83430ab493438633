#include "timing.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

namespace maya {
namespace {

struct State {
  std::mutex mutex;
  Pricing pricing;
  double host = 0;
  std::map<std::pair<int, c10::StreamId>, double> streams;
  std::vector<std::optional<Cost>> calls;
  std::vector<std::optional<double>> collectives;
};
State& state() {
  static auto* instance = new State;
  return *instance;
}
std::atomic<bool> on{false};

// Calls Python without holding the lock, because Python may run other threads in the meantime.
template <class Value, class Ask>
Value known(std::vector<std::optional<Value>>& table, uint32_t number, const Ask& ask) {
  {
    std::lock_guard lock(state().mutex);
    if (number < table.size() && table[number]) return *table[number];
  }
  const Value value = ask ? ask(number) : Value{};
  std::lock_guard lock(state().mutex);
  if (table.size() <= number) table.resize(number + 1);
  table[number] = value;
  return value;
}
Cost cost_of(uint32_t call) { return known(state().calls, call, state().pricing.call); }

void run(int device, c10::StreamId stream, double host_ns, double device_ns) {
  std::lock_guard lock(state().mutex);
  auto& clock = state().streams[{device, stream}];
  state().host += host_ns;
  clock = std::max(clock, state().host) + device_ns;
}

}  // namespace

void set_pricing(Pricing pricing) {
  Pricing before;  // its Python functions are released after the lock
  std::lock_guard lock(state().mutex);
  on = false;
  before = std::exchange(state().pricing, std::move(pricing));
  state().host = 0;
  state().streams.clear();
  state().calls.clear();
  state().collectives.clear();
}

void start_timing() { on = true; }
bool timing() { return on.load(std::memory_order_relaxed); }

void time_call(int device, c10::StreamId stream, uint32_t call) {
  const Cost cost = cost_of(call);
  const double dispatch = cost.dispatched ? state().pricing.host.dispatch_ns[int(current_place().second)] : 0;
  run(device, stream, dispatch + cost.host_ns, cost.device_ns);
}
void time_collective(int device, c10::StreamId stream, uint32_t collective) {
  run(device, stream, state().pricing.host.collective_ns,
      known(state().collectives, collective, state().pricing.collective));
}
void time_graph(int device, c10::StreamId stream, const std::vector<TraceEvent>& work) {
  double total = 0;
  for (const auto& event : work) {
    if (EventKind(event.kind) == EventKind::Op) total += cost_of(event.subject).device_ns;
    if (EventKind(event.kind) == EventKind::Collective)
      total += known(state().collectives, event.subject, state().pricing.collective);
  }
  run(device, stream, state().pricing.host.graph_ns, total);
}

double time_of_record(int device, c10::StreamId stream) {
  std::lock_guard lock(state().mutex);
  return std::max(state().streams[{device, stream}], state().host);
}
void stream_waits(int device, c10::StreamId stream, double until) {
  std::lock_guard lock(state().mutex);
  auto& clock = state().streams[{device, stream}];
  clock = std::max(clock, until);
}
void host_waits(double until) {
  std::lock_guard lock(state().mutex);
  state().host = std::max(state().host, until) + state().pricing.host.sync_ns;
}
void host_waits_for(int device, c10::StreamId stream) { host_waits(time_of_record(device, stream)); }
void host_waits_for_device(int device) {
  double latest = 0;
  {
    std::lock_guard lock(state().mutex);
    for (const auto& [where, clock] : state().streams)
      if (where.first == device) latest = std::max(latest, clock);
  }
  host_waits(latest);
}
double host_time() {
  std::lock_guard lock(state().mutex);
  return state().host;
}

}  // namespace maya
