// The recorder of what this process does with its emulated GPUs, in order. An event is a record of fixed size; what
// repeats (calls, module names, call sites) is a number that refers to a table in Python.
#pragma once
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace maya {

// Written to disk as numbers: only append, and change maya_core/trace/schema.py likewise.
enum class EventKind : uint8_t {
  Op = 0,            // subject: call
  Alloc = 1,         // subject: line of the program, a: address, b: bytes (rounded as the allocator does)
  Free = 2,          // a: address, b: bytes
  SegmentAlloc = 3,  // a: address, b: bytes
  SegmentFree = 4,   // a: address, b: bytes
  EventRecord = 5,   // subject: event handle, a: version
  EventWait = 6,     // the stream waits: subject: event handle, a: version
  EventSync = 7,     // the host waits: subject: event handle, a: version
  StreamSync = 8,    // the host waits for the stream
  DeviceSync = 9,    // the host waits for the device
  StepEnd = 10,      // a: step number, from 1
  GraphLaunch = 11,  // subject: graph; a: events that follow and belong to it
  OutOfMemory = 12,  // a: bytes requested
  Label = 13,        // the block at address a holds: subject (Category)
  Collective = 14,   // subject: call; a: sequence number on its communicator, or between two ranks; b: call site
  GroupBegin = 15,   // the collectives up to GroupEnd on this stream are one launch; subject: communicator
  GroupEnd = 16,
  HostWork = 17,    // the host computes; a: bytes it reads and writes
  Evaluation = 18,  // inserted after the recording; subject: evaluation loop, a: what happens in it
};

// Validation = 4 is only given after the recording.
enum class Phase : uint8_t { Forward = 0, Backward = 1, Recompute = 2, Optimizer = 3, Validation = 4 };

enum class Category : uint8_t { Parameter = 0, Gradient = 1, OptimizerState = 2, Buffer = 3, Workspace = 4 };

struct TraceEvent {
  int64_t time_ns;  // host clock since the recorder started
  int64_t a, b;
  uint32_t subject;
  uint32_t module;  // 0: outside any module
  uint16_t stream;
  uint8_t kind;   // EventKind
  uint8_t phase;  // Phase
  uint8_t device;
  uint8_t thread;  // a small number for each host thread; 0 is the first to record
  uint16_t flags;  // kReplayed, kOnHost, kTemporary
};
static_assert(sizeof(TraceEvent) == 40);
constexpr uint16_t kReplayed = 1;   // launched by a CUDA graph
constexpr uint16_t kOnHost = 2;     // a collective of host tensors: no stream takes part
constexpr uint16_t kTemporary = 4;  // memory that a kernel allocates and frees within its call

class Recorder {
 public:
  void start();
  void stop() { on_ = false; }
  bool on() const { return on_.load(std::memory_order_relaxed); }
  void add(EventKind kind, int device, int64_t stream, uint32_t subject, int64_t a = 0, int64_t b = 0,
           uint16_t flags = 0);
  void append(TraceEvent event);  // a replayed one; its time and module are set here
  size_t size();
  std::vector<TraceEvent> take();                 // removes and returns all events
  std::vector<TraceEvent> cut_work(size_t from);  // removes and returns the work launched since event `from`
  uint16_t stream_number(int device, int64_t stream);
  std::vector<std::pair<int, int64_t>> streams();

 private:
  int64_t now();  // with the lock held
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  int64_t start_ns_ = 0, latest_ns_ = 0;
  std::vector<TraceEvent> events_;
  std::vector<std::pair<int, int64_t>> streams_;
};

Recorder& recorder();

// Time that the emulation itself takes: planning of new calls, values that the host computes, waits for other emulated
// ranks. The program would not wait for it on a GPU, so the recorder's clock stands still meanwhile.
class OwnTime {
 public:
  OwnTime();
  ~OwnTime();
  OwnTime(const OwnTime&) = delete;
  OwnTime& operator=(const OwnTime&) = delete;

 private:
  int64_t begun_;
};
void exclude_time(int64_t nanoseconds);

// Where in the program the host is: the module whose forward runs, and the phase of training.
void enter_module(uint32_t module);
void leave_module();
uint32_t current_module();
std::pair<uint32_t, Phase> current_place();  // the module of an op that is called now, in backward too
void enter_optimizer();
void leave_optimizer();
void forget_modules();

}  // namespace maya
