// The tables in which the dynamic linker keeps the addresses of imported functions, and the beginning and the end of
// the overlay.

#include "overlay.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <set>
#include <unordered_map>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace overlay {

std::mutex tables_lock;

namespace {

// ---- replacing addresses ----

void redirect_all();

void* w_dlopen(const char* path, int flags) {
  Call call(AT_FDCWD, path && strchr(path, '/') ? path : nullptr, true, false);
  auto actual = call.passes() ? "" : call.place.actual();
  auto* loaded = dlopen(call.passes() ? path : actual.c_str(), flags);
  if (loaded && settings.load() && !(flags & RTLD_NOLOAD)) redirect_all();
  return loaded;
}

// Every function that is redirected, by its name.
const std::unordered_map<std::string, void*>& replacements() {
  static const auto table = [] {
    std::unordered_map<std::string, void*> all{{"dlopen", address(w_dlopen)}};
    for (const auto* functions : {&file_functions(), &folder_functions(), &program_functions()})
      all.insert(functions->begin(), functions->end());
    return all;
  }();
  return table;
}

struct Replaced {
  std::string object;
  ElfW(Addr) base;
  void** slot;
  void* before;
};

std::vector<Replaced> replaced;
std::set<std::pair<ElfW(Addr), std::string>> done_objects;
unsigned long long unloaded = 0;  // objects, when they were redirected

#if defined(__x86_64__)
constexpr unsigned KINDS[] = {R_X86_64_JUMP_SLOT, R_X86_64_GLOB_DAT, R_X86_64_64};
#elif defined(__aarch64__)
constexpr unsigned KINDS[] = {R_AARCH64_JUMP_SLOT, R_AARCH64_GLOB_DAT, R_AARCH64_ABS64};
#else
#error "the overlay knows x86-64 and aarch64"
#endif

void write_slot(void** slot, void* value, bool protect) {
  auto size = size_t(sysconf(_SC_PAGESIZE));
  auto* page = reinterpret_cast<void*>(uintptr_t(slot) & ~(size - 1));
  if (protect && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) return;
  __atomic_store_n(slot, value, __ATOMIC_RELEASE);
  if (protect) mprotect(page, size, PROT_READ);
}

// The table of an object's symbols, its names, and its relocations.
struct Tables {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  std::vector<std::pair<const ElfW(Rela)*, size_t>> relocations;
  ElfW(Addr) relro = 0, relro_end = 0;
};

Tables tables_of(const dl_phdr_info& object) {
  Tables found;
  const ElfW(Dyn)* dynamic = nullptr;
  for (int each = 0; each < object.dlpi_phnum; ++each) {
    auto& header = object.dlpi_phdr[each];
    if (header.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + header.p_vaddr);
    if (header.p_type == PT_GNU_RELRO) {
      found.relro = object.dlpi_addr + header.p_vaddr;
      found.relro_end = found.relro + header.p_memsz;
    }
  }
  if (dynamic == nullptr) return found;
  const ElfW(Rela)* jumps = nullptr, *others = nullptr;
  size_t jump_bytes = 0, other_bytes = 0;
  for (; dynamic->d_tag != DT_NULL; ++dynamic) {
    auto value = dynamic->d_un.d_ptr;
    switch (dynamic->d_tag) {
      case DT_SYMTAB: found.symbols = reinterpret_cast<const ElfW(Sym)*>(value); break;
      case DT_STRTAB: found.names = reinterpret_cast<const char*>(value); break;
      case DT_JMPREL: jumps = reinterpret_cast<const ElfW(Rela)*>(value); break;
      case DT_PLTRELSZ: jump_bytes = value; break;
      case DT_RELA: others = reinterpret_cast<const ElfW(Rela)*>(value); break;
      case DT_RELASZ: other_bytes = value; break;
    }
  }
  if (jumps) found.relocations.emplace_back(jumps, jump_bytes / sizeof(ElfW(Rela)));
  if (others) found.relocations.emplace_back(others, other_bytes / sizeof(ElfW(Rela)));
  return found;
}

bool ours_or_the_linkers(const dl_phdr_info& object) {
  static const ElfW(Addr) ours = [] {
    Dl_info info{};
    dladdr(address(redirect_all), &info);
    return reinterpret_cast<ElfW(Addr)>(info.dli_fbase);
  }();
  std::string name = object.dlpi_name ? object.dlpi_name : "";
  auto file = name.substr(name.rfind('/') + 1);
  return object.dlpi_addr == ours || file.rfind("libc.so", 0) == 0 || file.rfind("ld-linux", 0) == 0 ||
         file.rfind("libdl.so", 0) == 0 || file.rfind("libpthread.so", 0) == 0 || file.rfind("linux-vdso", 0) == 0;
}

int redirect(dl_phdr_info* object, size_t, void*) {
  if (object->dlpi_subs != unloaded) {  // another object may stand where one of these was
    unloaded = object->dlpi_subs;
    done_objects.clear();
  }
  std::string name = object->dlpi_name ? object->dlpi_name : "";
  if (ours_or_the_linkers(*object) || !done_objects.emplace(object->dlpi_addr, name).second) return 0;
  auto tables = tables_of(*object);
  if (tables.symbols == nullptr || tables.names == nullptr) return 0;
  for (auto [first, count] : tables.relocations) {
    for (size_t each = 0; each < count; ++each) {
      auto kind = ELF64_R_TYPE(first[each].r_info);
      if (kind != KINDS[0] && kind != KINDS[1] && kind != KINDS[2]) continue;
      auto& symbol = tables.symbols[ELF64_R_SYM(first[each].r_info)];
      if (symbol.st_shndx != SHN_UNDEF || (kind == KINDS[2] && first[each].r_addend != 0)) continue;
      auto found = replacements().find(tables.names + symbol.st_name);
      if (found == replacements().end()) continue;
      auto* slot = reinterpret_cast<void**>(object->dlpi_addr + first[each].r_offset);
      // A weak symbol that this C library does not have, or one that is redirected already.
      if (*slot == nullptr || *slot == found->second) continue;
      replaced.push_back({name, object->dlpi_addr, slot, *slot});
      auto at = ElfW(Addr)(slot);
      write_slot(slot, found->second, at >= tables.relro && at < tables.relro_end);
    }
  }
  return 0;
}

void redirect_all() {
  std::lock_guard lock(tables_lock);
  dl_iterate_phdr(redirect, nullptr);
}

int restore(dl_phdr_info* object, size_t, void*) {
  std::string name = object->dlpi_name ? object->dlpi_name : "";
  auto tables = tables_of(*object);
  for (auto& each : replaced) {
    auto at = ElfW(Addr)(each.slot);
    if (each.base == object->dlpi_addr && each.object == name)
      write_slot(each.slot, each.before, at >= tables.relro && at < tables.relro_end);
  }
  return 0;
}

// A fork must not find locks that a thread held which it does not have.
void lock_for_fork() {
  tables_lock.lock();
  listings_lock.lock();
}

void unlock_after_fork() {
  listings_lock.unlock();
  tables_lock.unlock();
}

std::atomic<uint8_t>* shared_flag(const std::string& path) {
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, 1) != 0) return nullptr;
  auto* flag = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return flag == MAP_FAILED ? nullptr : static_cast<std::atomic<uint8_t>*>(flag);
}

}  // namespace
}  // namespace overlay

using namespace overlay;

// `text` has a line for each setting: NAME=VALUE. Returns 0, or an errno.
EXPORTED int maya_overlay_start(const char* text) {
  auto* own = new Settings;
  std::string all = text, folder;
  for (size_t begin = 0; begin < all.size();) {
    auto end = std::min(all.find('\n', begin), all.size());
    auto line = all.substr(begin, end - begin);
    auto equals = line.find('=');
    auto name = line.substr(0, equals), value = equals == std::string::npos ? "" : line.substr(equals + 1);
    if (name == "folder") folder = value;
    if (name == "working") own->working = value;
    if (name == "untouched") own->untouched.push_back(value);
    if (name == "temporary") own->temporary.push_back(value);
    if (name == "begun") {
      own->begun.tv_sec = atoll(value.c_str());
      auto dot = value.find('.');
      own->begun.tv_nsec = dot == std::string::npos ? 0 : atoll(value.c_str() + dot + 1);
    }
    begin = end + 1;
  }
  own->files = folder + "/files";
  own->gone = folder + "/gone";
  own->coming = folder + "/coming.";
  own->variable = "MAYA_OVERLAY=" + all;
  own->untouched.push_back(folder);
  own->written = folder.empty() ? nullptr : shared_flag(folder + "/written");
  if (own->written == nullptr) return errno ? errno : EINVAL;
  Dl_info library{};
  dladdr(address(redirect_all), &library);
  own->library = library.dli_fname;
  settings.store(own, std::memory_order_release);
  static int once = pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
  (void)once;
  redirect_all();
  return 0;
}

EXPORTED void maya_overlay_stop() {
  settings.store(nullptr, std::memory_order_release);
  std::lock_guard lock(tables_lock);
  dl_iterate_phdr(restore, nullptr);
  replaced.clear();
  done_objects.clear();
}

namespace {

// In a child that got the library by LD_PRELOAD. An object, because it is made after those above.
const struct InChild {
  InChild() {
    if (auto* text = getenv("MAYA_OVERLAY")) maya_overlay_start(text);
  }
} in_child;

}  // namespace
