// Redirects the file functions of the C library in this process, so that what the program writes goes to a folder of
// Maya's, and what it reads is found there or in the real place: a union of two trees, as overlayfs makes one, without
// rights that a user does not have.
//
// The program's own calls, Python's and those of every library (torch's C++, safetensors' Rust, HDF5, SQLite) go
// through the tables in which the dynamic linker keeps the addresses of imported functions. `start` replaces the
// addresses of the functions below in all loaded objects, and in those that are loaded later; `stop` restores them.
// Children get the same library by LD_PRELOAD, with the same settings.
//
// In the folder, `files/PATH` is what stands at PATH instead of the real file, and `gone/PATH/.gone` says that what is
// really there, and all below it, was removed. Not redirected: programs that are linked statically, and system calls
// that bypass the C library.
//
// Settings, paths and what is done with them are in paths.cpp, the functions in files.cpp, folders.cpp and
// programs.cpp, and the tables of the linker in linker.cpp.

#pragma once

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace overlay {

struct Settings {
  std::string files, gone;             // the two trees of the overlay
  std::string coming;                  // the beginning of names of files that are not complete yet
  std::string variable, library;       // what children need: MAYA_OVERLAY=..., and the path of this library
  std::string working;                 // the program's folder, which is covered even below a temporary one
  std::vector<std::string> untouched;  // folders whose files are real: devices, caches, Maya's own
  std::vector<std::string> temporary;  // folders in which new files are real, and older ones are protected
  timespec begun{};                    // when the run began: temporary files from before are somebody's
  std::atomic<uint8_t>* written{};     // shared by all processes: whether the overlay has anything at all
};

extern std::atomic<const Settings*> settings;          // null while nothing is covered
extern constinit thread_local const Settings* in_use;  // by the function that is being called
extern std::mutex listings_lock, tables_lock;          // which a fork must not find locked

struct Place {
  std::string path;            // as the program sees it, without links
  bool upper = false;          // something stands there in the overlay
  bool lower = false;          // and in the real place, where it has not been removed
  bool link = false;           // it is a symbolic link
  std::string actual() const;  // where to read it
  bool there() const { return upper || lower; }
};

// What becomes of a call. Calls that only read pass while the overlay is empty.
class Call {
 public:
  Place place;

  Call(int folder, const char* path, bool follow, bool writes);

  bool passes() const { return !covered_; }  // it is left as it is, and not answered from both trees

 private:
  bool covered_ = false;
};

// ---- paths ----

bool below(const std::string& path, const std::string& folder);
bool untouched(const Settings& own, const std::string& path);
std::string as_seen(const Settings& own, std::string path);
std::string folder_of(const std::string& path);
std::string at_descriptor(int descriptor);
std::string working_folder();
std::string absolute(const Settings& own, int folder, const char* path);
mode_t kind_of(const std::string& path);
bool exists(const std::string& path);
bool is_folder(const std::string& path);
std::string upper_of(const std::string& path);
std::string target_of(const std::string& path);
Place look(const std::string& path);
Place resolve(const std::string& wanted, bool follow);

// ---- changes in the overlay ----

// Bytes of a file that is copied because the program changes a part of it.
inline constexpr off_t LARGEST_COPY = off_t(4) << 30;

bool is_protected(const Place& place);
bool make_folders(const std::string& path);
void begin_writing();
bool prepare(const Place& place);
bool copy_data(int source, int target, off_t size);
bool copy(const std::string& from, const std::string& to, bool replaces = false);
bool bring(const Place& place);
void mark_removed(const std::string& path);
int fails(int error);

// ---- functions that stand in for those of the C library ----

using Functions = std::vector<std::pair<const char*, void*>>;  // by the name that they replace

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Runs `act(folder, path)` on the place where something really stands.
template <typename Act>
auto read_at(int folder, const char* path, bool follow, Act act) {
  Call call(folder, path, follow, false);
  if (call.passes()) return act(folder, path);
  if (!call.place.there() && exists(call.place.path)) {  // removed by the program
    errno = ENOENT;
    return decltype(act(folder, path))(-1);
  }
  auto actual = call.place.actual();
  return act(AT_FDCWD, actual.c_str());
}

const Functions& file_functions();
const Functions& folder_functions();
const Functions& program_functions();

int open_at(int folder, const char* path, int flags, mode_t mode);
int make_unique(char* name, int suffix, const std::function<int()>& make);

}  // namespace overlay
