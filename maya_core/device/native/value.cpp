#include "value.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <cmath>
#include <deque>
#include <map>
#include <mutex>
#include <random>

#include "trace.h"

namespace maya {
namespace {

using c10::IValue;

constexpr int64_t kCopied = 1 << 16;  // bytes: smaller data of the host are copied at once
// Also memory of other libraries, whose changes torch does not count. Floats seldom decide a size.
constexpr int64_t kCopiedForeign = int64_t(1) << 26, kCopiedForeignFloats = int64_t(1) << 20;
constexpr int64_t kHeldFloats = int64_t(1) << 29, kHeldIntegers = int64_t(1) << 32;  // bytes
constexpr int64_t kKeptSample = 1 << 20;                 // bytes: larger samples are made again at each reading
constexpr double kMostSpent = double(int64_t(1) << 34);  // on products and random numbers in a process

struct CannotCompute : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::recursive_mutex& computing() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
double spent = 0;  // on products and random numbers, in elements
std::optional<bool> the_extreme;

}  // namespace

// ---- memory of the program that values refer to ----
struct HeldMemory {  // at most so many bytes; the values that refer to the oldest become samples
  const int64_t most;
  std::mutex mutex = {};
  std::deque<c10::weak_intrusive_ptr<Value>> values = {};
  int64_t bytes = 0;

  void add(const ValueRef& value) {
    std::vector<ValueRef> lost;  // freed after the lock, because memory of numpy needs Python's
    {
      std::lock_guard lock(mutex);
      bytes += std::get<Data>(value->is).bytes;
      values.emplace_back(value);
      for (int64_t left = bytes; left > most && values.size() > 1; values.pop_front())
        if (auto oldest = values.front().lock()) {
          const auto* data = std::get_if<Data>(&oldest->is);
          if (data && data->program) left -= data->bytes;
          lost.push_back(std::move(oldest));
        }
    }
    std::lock_guard lock(computing());
    for (const auto& one : lost)
      if (const auto* data = std::get_if<Data>(&one->is); data && data->program) lose(*one, data->program->dtype);
  }
  void remove(int64_t freed) {
    std::lock_guard lock(mutex);
    bytes -= freed;
  }
  void lose(Value& value, at::ScalarType dtype) {
    const auto kept = std::exchange(value.is, sampled_value(dtype, Sample::Any)->is);
    value.made_up = true;
    value.routed = false;
    remove(std::get<Data>(kept).bytes);
  }
};

namespace {

HeldMemory& budget_of(at::ScalarType dtype) {
  static auto* floats = new HeldMemory{.most = kHeldFloats};
  static auto* integers = new HeldMemory{.most = kHeldIntegers};
  return at::isIntegralType(dtype, true) ? *integers : *floats;
}

uint64_t digest_of(const char* start, int64_t bytes) {  // of some of the bytes, evenly spaced
  constexpr int64_t kWords = 256;
  const int64_t words = bytes / 8, stride = std::max<int64_t>(1, words / kWords);
  uint64_t digest = 0xCBF29CE484222325ull;
  for (int64_t i = 0; i < words; i += stride) {
    uint64_t word;
    memcpy(&word, start + 8 * i, 8);
    digest = (digest ^ word) * 0x100000001B3ull;
  }
  return digest;
}

bool owned_by_torch(const c10::Storage& storage) {
  return storage.allocator() == c10::GetCPUAllocator() ||
         storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

Data new_data(int64_t bytes) {
  auto memory = c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true);
  auto* start = static_cast<char*>(memory.mutable_data());
  return {std::move(memory), start, bytes};
}

at::Tensor view(const Data& data, const Layout& layout) {
  const int64_t item = c10::elementSize(layout.dtype);
  const auto needed = at::detail::computeStorageNbytes(layout.sizes, layout.strides, item, layout.offset);
  if (int64_t(needed) > layout.bytes) throw CannotCompute("the tensor is larger than its storage");
  // The view keeps the memory alive.
  auto flat = at::from_blob(
      data.start, {layout.bytes / item}, [memory = data.memory](void*) {}, at::TensorOptions().dtype(layout.dtype));
  auto tensor = flat.as_strided(layout.sizes, layout.strides, layout.offset);
  if (layout.conj) tensor = tensor._conj();
  if (layout.neg) tensor = tensor._neg_view();
  return tensor;
}

at::Tensor element_of(const Uniform& uniform) {
  auto element = at::empty({}, at::TensorOptions().dtype(uniform.dtype));
  memcpy(element.mutable_data_ptr(), uniform.element.data(), element.element_size());
  return element;
}

// ---- samples ----
constexpr int64_t kPeriod = 65521;  // a prime, so that no dimension of a tensor repeats with it

const at::Tensor& numbers(at::ScalarType dtype, Sample sample) {
  static auto* made = new std::map<std::pair<at::ScalarType, Sample>, at::Tensor>;
  auto& table = (*made)[{dtype, sample}];
  if (table.defined()) return table;
  std::mt19937 random(20250319);
  auto base = at::empty({kPeriod}, at::TensorOptions().dtype(at::kDouble));
  auto* out = base.mutable_data_ptr<double>();
  for (int64_t i = 0; i < kPeriod; i++) {  // Box and Muller: the same numbers with every standard library
    const double u = (random() + 0.5) / 4294967296.0, v = (random() + 0.5) / 4294967296.0;
    const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
    const double above = std::abs(normal) + 1e-3;
    out[i] = sample == Sample::Any        ? normal
             : sample == Sample::Positive ? above
             : sample == Sample::Negative ? -above
                                          : u;
  }
  if (dtype == at::kBool) table = base.gt(0);
  else if (at::isIntegralType(dtype, false)) table = at::zeros({kPeriod}, at::TensorOptions().dtype(dtype));
  else table = base.to(dtype);
  return table;
}

int64_t scalars_drawn = 0;
uint64_t samples_made = 0;

// A single number falls a little from one to the next, as the loss of a training that goes well does.
at::Scalar drawn_number(const Sampled& sampled) {
  if (sampled.dtype == at::kBool) return false;
  if (at::isIntegralType(sampled.dtype, false)) return 0;
  const double falling = 1 + 0.5 / (1 + double(scalars_drawn++) / 1024);
  return sampled.sample == Sample::Unit ? falling / 2 : sampled.sample == Sample::Negative ? -falling : falling;
}

void draw_indices(const Sampled& sampled, int64_t* out, int64_t elements) {
  if (the_extreme) {  // every row chooses the same ones
    for (int64_t i = 0; i < elements; i++) {
      const int64_t place = (i / sampled.stride) % sampled.per_row % sampled.choices;
      out[i] = *the_extreme ? place : sampled.choices - 1 - place;
    }
    return;
  }
  std::mt19937_64 random(sampled.seed);
  std::vector<int64_t> deck;
  const int64_t choices = sampled.choices, per_row = sampled.per_row, stride = sampled.stride;
  for (int64_t block = 0; block < elements; block += per_row * stride)
    for (int64_t inner = 0; inner < stride; inner++) {
      int64_t* row = out + block + inner;
      if (per_row == 1 || per_row > choices) {
        for (int64_t j = 0; j < per_row; j++) row[j * stride] = random() % choices;
        continue;
      }
      if (int64_t(deck.size()) != choices) {
        deck.resize(choices);
        for (int64_t j = 0; j < choices; j++) deck[j] = j;
      }
      for (int64_t j = 0; j < per_row; j++) {
        std::swap(deck[j], deck[j + random() % (choices - j)]);
        row[j * stride] = deck[j];
      }
    }
}

Data draw(const Sampled& sampled, int64_t bytes) {
  const int64_t item = c10::elementSize(sampled.dtype), elements = bytes / item;
  if (elements > kMostSampled) throw CannotCompute("too large to sample");
  Data data = new_data(bytes);
  if (sampled.choices) {
    draw_indices(sampled, reinterpret_cast<int64_t*>(data.start), elements);
  } else if (elements == 1) {
    auto one = at::scalar_tensor(drawn_number(sampled), at::TensorOptions().dtype(sampled.dtype));
    memcpy(data.start, one.const_data_ptr(), item);
  } else if (the_extreme && sampled.dtype == at::kBool) {
    memset(data.start, *the_extreme, bytes);
  } else {
    const auto& table = numbers(sampled.dtype, sampled.sample);
    const auto* from = static_cast<const char*>(table.const_data_ptr());
    int64_t at = int64_t(sampled.seed * 7919 % kPeriod);
    for (int64_t done = 0; done < elements;) {
      const int64_t count = std::min(elements - done, kPeriod - at);
      memcpy(data.start + done * item, from + at * item, count * item);
      done += count;
      at = 0;
    }
  }
  return data;
}

// ---- recipes ----
IValue with_operands(const IValue& value, const std::vector<at::Tensor>& tensors, size_t& next) {
  const auto place = operand_place();
  auto one = [&](const at::Tensor& tensor) { return tensor.is_same(place) ? tensors[next++] : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(one(tensor));
    return list;
  }
  if (value.isList()) {
    bool any = false;
    for (const auto& item : value.toListRef()) any = any || item.isTensor();
    if (!any) return value;
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : value.toListRef())
      list.push_back(item.isNone() ? std::optional<at::Tensor>() : one(item.toTensor()));
    return list;
  }
  return value;
}

bool is_generator(const c10::TypePtr& type) {
  return type->kind() == c10::TypeKind::GeneratorType ||
         (type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType);
}

// The result of a host op as the bytes of the device tensor's storage.
Data stored(const at::Tensor& result, const Layout& layout) {
  if (!result.defined() || result.sizes() != c10::IntArrayRef(layout.sizes) || result.scalar_type() != layout.dtype)
    throw CannotCompute("the host's result has another shape");
  const bool same = result.strides() == c10::IntArrayRef(layout.strides) && result.storage_offset() == 0 &&
                    layout.offset == 0 && int64_t(result.storage().nbytes()) == layout.bytes && !result.is_conj() &&
                    !result.is_neg();
  if (same) {
    auto* start = static_cast<char*>(result.storage().mutable_data());
    return {result.storage(), start, layout.bytes};
  }
  Data data = new_data(layout.bytes);
  const bool covered = result.numel() * int64_t(result.element_size()) == layout.bytes;
  if (!covered) memset(data.start, 0, layout.bytes);
  view(data, layout).copy_(result);
  return data;
}

void heal(const at::Tensor& tensor) {  // training is assumed to go well: what rests on samples has no NaN
  if (at::isFloatingType(tensor.scalar_type()))
    at::nan_to_num_(const_cast<at::Tensor&>(tensor), 1.0, INFINITY, -INFINITY);
}

Data writable(const Operand& operand) {
  Layout bytes;
  bytes.sizes = {operand.layout.bytes};
  bytes.strides = {1};
  bytes.bytes = operand.layout.bytes;
  Data data = new_data(operand.layout.bytes);
  if (operand.layout.bytes) view(data, bytes).copy_(read_value(operand.value, bytes));
  return data;
}

void run(Recipe& recipe) {
  if (recipe.heavy || recipe.seed) {
    spent += recipe.cost;
    if (spent > kMostSpent) throw CannotCompute("too much to compute");
  }
  std::vector<at::Tensor> tensors;
  std::vector<std::pair<int, Data>> made;
  for (size_t i = 0; i < recipe.operands.size(); i++) {
    const auto& operand = recipe.operands[i];
    if (operand.written) {
      made.emplace_back(~int(i), writable(operand));
      tensors.push_back(view(made.back().second, operand.layout));
    } else {
      tensors.push_back(read_value(operand.value, operand.layout));
    }
    note_origin(recipe, *operand.value);  // reading may have shown that it cannot be computed
  }
  torch::jit::Stack stack;
  size_t next = 0;
  for (size_t i = 0; i < recipe.arguments.size(); i++) {
    if (recipe.seed && is_generator(recipe.op.schema().arguments()[i].type()) && !recipe.arguments[i].isGenerator())
      stack.push_back(at::make_generator<at::CPUGeneratorImpl>(*recipe.seed));
    else stack.push_back(with_operands(recipe.arguments[i], tensors, next));
  }
  try {
    recipe.op.callBoxed(&stack);
  } catch (const std::exception& error) {
    throw CannotCompute(error.what());  // the host has no kernel for this call
  }
  const auto results = flat(stack);
  for (const auto& [slot, layout] : recipe.results) {
    if (slot >= int(results.size())) throw CannotCompute("the host gives fewer results");
    if (recipe.made_up) heal(results[slot]);
    made.emplace_back(slot, stored(results[slot], layout));
  }
  if (recipe.made_up)
    for (size_t i = 0; i < tensors.size(); i++)
      if (recipe.operands[i].written) heal(tensors[i]);
  recipe.made = std::move(made);
  recipe.done = true;
  recipe.arguments.clear();
  recipe.operands.clear();
}

// Whether a result rests on nothing made up but the choices of a router.
bool is_routed(const Recipe& recipe, int slot) {
  return (recipe.made_up || recipe.of_weights) && (!recipe.of_numbers || (recipe.routes && slot == 1));
}

// The first reading of a computed value computes it. What cannot be computed becomes a sample.
void settle(Value& value, const Layout& layout) {
  auto* computed = std::get_if<Computed>(&value.is);
  if (!computed) return;
  auto recipe = computed->recipe;
  const int slot = computed->slot;
  at::ScalarType dtype = layout.dtype;
  for (const auto& [index, result] : recipe->results)
    if (index == slot) dtype = result.dtype;
  if (slot < 0 && !recipe->done) dtype = recipe->operands[~slot].layout.dtype;
  try {
    if (!recipe->done) {
      if (value.cost > kMostCost) throw CannotCompute("too much to compute");
      run(*recipe);
    }
    for (auto& [index, data] : recipe->made)
      if (index == slot) {
        value.made_up = value.made_up || recipe->made_up;
        value.routed = is_routed(*recipe, slot);
        value.of_weights = value.of_weights || recipe->of_weights;
        value.is = data;
        value.depth = 0;
        value.cost = 0;
        return;
      }
    throw CannotCompute("no such result");
  } catch (const CannotCompute&) {
    value.is = Sampled{dtype, Sample::Any, ++samples_made};
    value.made_up = true;
    value.routed = false;
    value.depth = 0;
    value.cost = 0;
  }
}

bool changed_since(const Data& data) {
  const auto& then = *data.program;
  if (then.version && then.version->first.current_version() != then.version->second) return true;
  return then.digest != digest_of(data.start, data.bytes);
}

// The bytes of the value; `bytes` of them.
Data bytes_of(Value& value, const Layout& layout) {
  settle(value, layout);
  if (auto* data = std::get_if<Data>(&value.is)) {
    if (!data->program || !changed_since(*data)) return *data;
    data->program->budget->lose(value, data->program->dtype);  // the program has changed its memory since
  }
  if (const auto* uniform = value.uniform()) {
    Data data = new_data(layout.bytes);
    const int64_t item = c10::elementSize(uniform->dtype);
    at::from_blob(data.start, {layout.bytes / item}, at::TensorOptions().dtype(uniform->dtype))
        .copy_(element_of(*uniform).expand({layout.bytes / item}));
    return data;
  }
  Data data = draw(std::get<Sampled>(value.is), layout.bytes);
  if (layout.bytes <= kKeptSample) value.is = data;
  return data;
}

}  // namespace

Layout::Layout(const at::Tensor& tensor)
    : sizes(tensor.sizes()),
      strides(tensor.strides()),
      offset(tensor.storage_offset()),
      bytes(int64_t(tensor.storage().nbytes())),
      dtype(tensor.scalar_type()),
      conj(tensor.is_conj()),
      neg(tensor.is_neg()) {}

Value::~Value() { release_resources(); }

void Value::release_resources() {
  if (auto* data = std::get_if<Data>(&is); data && data->program) data->program->budget->remove(data->bytes);
  is = Uniform{};
}

void note_origin(Recipe& recipe, const Value& operand) {
  recipe.made_up = recipe.made_up || operand.made_up;
  recipe.of_numbers = recipe.of_numbers || ((operand.made_up || operand.of_weights) && !operand.routed);
  recipe.of_weights = recipe.of_weights || operand.of_weights;
}

ValueRef uniform_value(at::ScalarType dtype, const at::Scalar& value) {
  Uniform uniform{dtype, {}};
  auto element = at::scalar_tensor(value, at::TensorOptions().dtype(dtype));
  memcpy(uniform.element.data(), element.const_data_ptr(), element.element_size());
  return c10::make_intrusive<Value>(uniform);
}

ValueRef as_weights(const ValueRef& value) {
  std::lock_guard lock(computing());
  if (const auto* data = std::get_if<Data>(&value->is); data && data->program)  // which this value keeps track of
    return sampled_value(data->program->dtype, Sample::Any);
  auto copy = c10::make_intrusive<Value>(value->is);
  copy->made_up = value->made_up;
  copy->routed = value->routed;
  copy->of_weights = true;
  copy->depth = value->depth;
  copy->cost = value->cost;
  return copy;
}

ValueRef sampled_value(at::ScalarType dtype, Sample sample) {
  auto value = c10::make_intrusive<Value>(Sampled{dtype, sample, ++samples_made});
  value->made_up = true;
  return value;
}

ValueRef sampled_indices(int64_t choices, int64_t per_row, int64_t stride, bool routed) {
  auto value = c10::make_intrusive<Value>(Sampled{at::kLong, Sample::Any, ++samples_made, choices, per_row, stride});
  value->made_up = true;
  value->routed = routed;
  return value;
}

ValueRef host_data(const at::Tensor& dense, bool made_up) {
  const int64_t bytes = dense.numel() * int64_t(dense.element_size());
  auto* start = static_cast<char*>(const_cast<void*>(dense.const_data_ptr()));
  const bool foreign = !owned_by_torch(dense.storage()) || dense.is_inference();
  const bool integral = at::isIntegralType(dense.scalar_type(), true);
  if (bytes <= (!foreign ? kCopied : integral ? kCopiedForeign : kCopiedForeignFloats)) {
    Data data = new_data(bytes);
    memcpy(data.start, start, bytes);
    auto value = c10::make_intrusive<Value>(data);
    value->made_up = made_up;
    return value;
  }
  auto& budget = budget_of(dense.scalar_type());
  Data::Program then{&budget, dense.scalar_type(), {}, digest_of(start, bytes)};
  // A parameter keeps its version when its memory is replaced, as Module.cuda() does.
  if (!dense.is_inference() && !dense.requires_grad()) {
    const auto& version = dense.unsafeGetTensorImpl()->version_counter();
    then.version = {version, version.current_version()};
  }
  auto value = c10::make_intrusive<Value>(Data{dense.storage(), start, bytes, then});
  value->made_up = made_up;
  budget.add(value);
  return value;
}

at::Tensor read_value(const ValueRef& value, const Layout& layout) {
  const OwnTime computing_values;
  OnHost on_host;
  std::lock_guard lock(computing());
  const auto* uniform = value->uniform();
  if (uniform && uniform->dtype == layout.dtype && !layout.conj && !layout.neg) {
    auto element = element_of(*uniform);
    if (layout.bytes > kKeptSample) return element.expand(layout.sizes);
    // Host kernels rely on the strides of their arguments.
    auto memory = at::empty({layout.bytes / int64_t(element.element_size())}, element.options());
    return memory.copy_(element.expand_as(memory)).as_strided(layout.sizes, layout.strides, layout.offset);
  }
  try {
    return view(bytes_of(*value, layout), layout);
  } catch (const CannotCompute&) {  // too large even to sample
    return element_of({layout.dtype, {}}).expand(layout.sizes);
  }
}

at::Tensor operand_place() {
  static const auto* place = new at::Tensor(at::empty({0}));
  return *place;
}

std::vector<at::Tensor> flat(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const auto& value : results) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(tensor);
    else tensors.emplace_back();
  }
  return tensors;
}

double cost_of_product(double operands_and_result) { return 2 * std::sqrt(operands_and_result) / 16; }

bool compute(Recipe& recipe) {
  const OwnTime computing_values;
  OnHost on_host;
  std::lock_guard lock(computing());
  try {
    if (!recipe.done) run(recipe);
    return true;
  } catch (const CannotCompute&) { return false; }
}

ValueRef result_of(const c10::intrusive_ptr<Recipe>& recipe, int slot) {
  if (recipe->done) {
    for (const auto& [index, data] : recipe->made)
      if (index == slot) {
        auto value = c10::make_intrusive<Value>(data);
        value->made_up = recipe->made_up;
        value->routed = is_routed(*recipe, slot);
        value->of_weights = recipe->of_weights;
        return value;
      }
  }
  auto value = c10::make_intrusive<Value>(Computed{recipe, slot});
  value->made_up = recipe->made_up;
  value->routed = is_routed(*recipe, slot);
  value->of_weights = recipe->of_weights;
  for (const auto& operand : recipe->operands) {
    value->depth = std::max(value->depth, operand.value->depth);
    value->cost = std::max(value->cost, operand.value->cost);
  }
  value->depth++;
  value->cost += recipe->cost;
  return value;
}

void set_extreme(std::optional<bool> everything) { the_extreme = everything; }
std::optional<bool> extreme() { return the_extreme; }

void forget_samples() {
  std::lock_guard lock(computing());
  scalars_drawn = 0;
  samples_made = 0;
  spent = 0;
}

}  // namespace maya
