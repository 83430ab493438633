// The emulated device for the rest of the native code: its configuration, memory and streams, and the values that it
// remembers. One process emulates one node: `config().count` GPUs of one kind.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "allocator.h"
#include "trace.h"
#include "value.h"

namespace maya {

constexpr int kMaxDevices = 64;

struct DeviceConfig {
  int count = 1;
  int major = 9, minor = 0;
  int64_t total_bytes = 0;                    // as the driver reports it
  int64_t outside_bytes = 0;                  // CUDA context and libraries
  bool prefer_cudnn_attention = false;        // this GPU's default
  bool deprioritize_cudnn_attention = false;  // by an environment variable
  std::string allocator_conf;
  int64_t cudnn_version = 0;
  int64_t cuda_version = 0;
};
const DeviceConfig& config();
// The ops of ATen that get a kernel here.
struct OpNames {
  std::vector<std::string> cuda;            // with a CUDA kernel in a CUDA build
  std::vector<std::string> sparse, nested;  // of these layouts, with one implementation for CPU and CUDA
};
void install(DeviceConfig config, const OpNames& ops);
void grow(int count);  // the number of GPUs, while installed; it never shrinks
void uninstall();
bool installed();

// ---- which device and stream the calling thread works on ----
int current_device();
void set_current_device(int device);
c10::StreamId current_stream(int device);
void set_current_stream(int device, c10::StreamId stream);
c10::StreamId stream_from_pool(int device, int priority);
int stream_priority(c10::StreamId stream);
uint64_t stream_handle(int device, c10::StreamId stream);  // the value of cudaStream_t; 0 is the default stream
c10::StreamId stream_of_handle(uint64_t handle);

// Makes a device current for as long as this exists.
struct OnDevice {
  explicit OnDevice(int device) : previous(current_device()) {
    if (device != previous) set_current_device(device);
  }
  ~OnDevice() {
    if (current_device() != previous) set_current_device(previous);
  }
  int previous;
};

double elapsed_ms(uint64_t from_event, uint64_t to_event);  // by torch.Event.event_id
void synchronize_device(int device);
void synchronize_stream(int device, c10::StreamId stream);

at::Generator& default_generator(int device);
// The next seed for random values that the host draws instead of the device. It depends on the generator's state.
uint64_t draw_seed(const std::optional<at::Generator>& generator);

// ---- memory ----
struct Shadow {  // what is known about the bytes of an allocation
  enum Kind : uint8_t { Unknown, Fresh, Valued };
  Kind kind = Unknown;          // Fresh: never written
  Sample sample = Sample::Any;  // of an Unknown one
  ValueRef value = {};          // of a Valued one
};

struct Allocation {
  Block* block;
  CachingAllocator* allocator;
  int device;
  Shadow shadow;
};

CachingAllocator& allocator(int device);
bool is_current(const CachingAllocator* allocator);
c10::Allocator* device_allocator();  // from which c10 allocates cuda storages
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
Allocation* allocation_of(const c10::TensorImpl* tensor);  // null: the storage is empty, or not on the emulated device
Allocation* allocation_of(const c10::DataPtr& pointer);
at::Tensor new_tensor(c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype);  // on the current device
void resize_storage(c10::StorageImpl* storage, int64_t bytes);
void free_and_forget_memory(c10::StorageImpl* storage);  // the address stays, but belongs to nothing
// cuBLAS has a workspace for each handle and stream, and a handle for each thread. A workspace is allocated on first
// use and kept until it is cleared. Before torch 2.12, cublasLt has its own; since then it uses that of cuBLAS.
enum class BlasLibrary : uint8_t { Blas, Lt };
void ensure_blas_workspace(BlasLibrary library, int64_t bytes);
void clear_blas_workspaces();
// What this thread does until `end_aside` does not belong to the program: benchmarks of a compiler, which keeps their
// results. Memory comes from a device without a limit, and nothing is recorded; `end_aside` returns the numbers of the
// calls that were made.
void begin_aside();
std::vector<uint32_t> end_aside();
bool aside();
// Sets the category of this thread's later allocations (none: the phase decides) and returns the previous one.
std::optional<uint32_t> allocate_as(std::optional<uint32_t> category);
// While one of these exists, this thread's allocations are temporaries of a kernel. They are marked in the record,
// because the same call has others on another GPU.
struct AsTemporary {
  AsTemporary();
  ~AsTemporary();
};

// ---- CUDA graphs: a capture takes work out of the record, a replay records it again ----
struct Graph {
  std::vector<TraceEvent> work;
  uint32_t number = 0;
  int device = 0;
  MempoolId pool;
  bool holds_pool = false;
  uint16_t stream = 0;  // on which it was captured, by the recorder's number
};
bool capturing();
void begin_capture(Graph& graph, MempoolId pool);
void end_capture(Graph& graph);
void replay(const Graph& graph);
void reset(Graph& graph);

}  // namespace maya
