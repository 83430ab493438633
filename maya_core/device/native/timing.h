// Predicted time for programs that read it with Event.elapsed_time or a timer. It is off until the program first
// records an event with timing, so that other programs do not pay for it.
//
// The host runs ahead of its streams. A call costs the host what the host model says, a stream starts the call's
// kernels once the host has launched them and the stream is free, and a synchronization makes the host wait. This is
// the simulator's model for one rank without contention.
#pragma once
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "trace.h"

namespace maya {

struct Cost {
  double device_ns = 0;    // kernels and the gaps between them
  double host_ns = 0;      // launches
  bool dispatched = true;  // through torch's dispatcher, which costs the host by phase
};
struct HostCosts {
  double dispatch_ns[4] = {0, 0, 0, 0};  // by Phase
  double collective_ns = 0, graph_ns = 0, sync_ns = 0;
};
// The durations of calls and collectives, by their number in the trace. Each is requested once.
struct Pricing {
  std::function<Cost(uint32_t)> call;
  std::function<double(uint32_t)> collective;
  HostCosts host;
};
void set_pricing(Pricing pricing);

void start_timing();  // no effect if it is on
bool timing();
void time_call(int device, c10::StreamId stream, uint32_t call);
void time_collective(int device, c10::StreamId stream, uint32_t collective);
void time_graph(int device, c10::StreamId stream, const std::vector<TraceEvent>& work);
double time_of_record(int device, c10::StreamId stream);  // when the stream reaches an event that is recorded now
void stream_waits(int device, c10::StreamId stream, double until);
void host_waits(double until);
void host_waits_for(int device, c10::StreamId stream);
void host_waits_for_device(int device);
double host_time();  // nanoseconds since timing began

}  // namespace maya
