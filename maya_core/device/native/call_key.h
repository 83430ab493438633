// The key by which the device looks up calls. Every op builds one, so this does not allocate memory.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <bit>
#include <memory>
#include <string>
#include <vector>

namespace maya {

// Everything that decides the metadata of a call's results.
struct Key {
  std::vector<int64_t> words;
  std::vector<c10::TensorImpl*> tensors;       // in order; alive as long as the stack
  c10::SmallVector<const void*, 16> storages;  // which of them share memory

  void clear() {
    words.clear();
    tensors.clear();
    storages.clear();
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      words.push_back(-1);
      return;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    int64_t alias = 0;
    if (impl->has_storage()) {
      const void* storage = impl->unsafe_storage().unsafeGetStorageImpl();
      const size_t looked_at = std::min<size_t>(storages.size(), 16);
      for (alias = 0; alias < int64_t(looked_at) && storages[alias] != storage; alias++) {}
      if (alias == int64_t(looked_at)) {
        alias = storages.size();
        if (storages.size() < 16) storages.push_back(storage);
      }
    }
    words.push_back(int64_t(c10::typeMetaToScalarType(impl->dtype())) | int64_t(impl->dim()) << 8 |
                    int64_t(tensor.device().type()) << 16 | int64_t(impl->is_wrapped_number()) << 24 |
                    int64_t(tensor.is_conj()) << 25 | int64_t(tensor.is_neg()) << 26 | int64_t(impl->layout()) << 27 |
                    alias << 32 | int64_t(tensor.device().index() + 1) << 48);
    if (impl->layout() == at::kStrided) {
      const auto sizes = impl->sizes(), strides = impl->strides();
      words.insert(words.end(), sizes.begin(), sizes.end());
      words.insert(words.end(), strides.begin(), strides.end());
    } else {
      const auto sizes = impl->sizes();
      words.insert(words.end(), sizes.begin(), sizes.end());
    }
    tensors.push_back(impl);
  }

  // `number_matters`: a Scalar argument changes the results' metadata (arange, full), not only their values (add, mul).
  void add(const c10::IValue& value, bool number_matters) {
    if (value.isTensor()) {
      words.push_back(1);
      add(value.toTensor());
    } else if (value.isNone()) words.push_back(2);
    else if (value.isInt()) {
      words.push_back(3);
      words.push_back(number_matters ? value.toInt() : 0);
    } else if (value.isBool()) words.push_back(value.toBool() ? 5 : 4);
    else if (value.isDouble()) {
      double number = number_matters ? value.toDouble() : 0;
      words.push_back(6);
      words.push_back(std::bit_cast<int64_t>(number));
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      words.push_back(7);
      words.push_back(list.size());
      for (size_t i = 0; i < list.size(); i++) add(static_cast<const c10::IValue&>(list.get(i)).toTensor());
    } else if (value.isIntList()) {
      auto list = value.toIntVector();
      words.push_back(8);
      words.push_back(list.size());
      words.insert(words.end(), list.begin(), list.end());
    } else if (value.isDevice()) {
      words.push_back(9);
      words.push_back(int64_t(value.toDevice().type()));
    } else if (value.isString()) {
      words.push_back(10);
      words.push_back(std::hash<std::string>()(value.toStringRef()));
    } else if (value.isGenerator()) words.push_back(11);
    else if (value.isList()) {
      const auto& items = value.toListRef();
      words.push_back(12);
      words.push_back(items.size());
      for (const auto& item : items) add(item, number_matters);
    } else if (value.isSymInt()) {
      words.push_back(3);
      words.push_back(value.toSymInt().guard_int(__FILE__, __LINE__));
    } else words.push_back(13);
  }

  uint64_t hash() const {
    uint64_t hash = 0x9E3779B97F4A7C15ull;
    for (int64_t word : words) {
      hash = (hash ^ uint64_t(word)) * 0xff51afd7ed558ccdull;
      hash ^= hash >> 32;
    }
    return hash;
  }
};

// A key for the current op. Keys are reused within a thread; an op that calls another op needs a second one.
struct ScopedKey {
  static std::vector<std::unique_ptr<Key>>& idle() {
    thread_local std::vector<std::unique_ptr<Key>> keys;
    return keys;
  }
  std::unique_ptr<Key> key;
  ScopedKey() {
    if (idle().empty()) key = std::make_unique<Key>();
    else {
      key = std::move(idle().back());
      idle().pop_back();
      key->clear();
    }
  }
  ~ScopedKey() { idle().push_back(std::move(key)); }
  Key* operator->() { return key.get(); }
};

}  // namespace maya
