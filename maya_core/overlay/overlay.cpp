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

#include <dirent.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <linux/fs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

// ---- settings ----

struct Settings {
  std::string files, gone;             // the two trees of the overlay
  std::string working;                 // the program's folder, which is covered even below a temporary one
  std::vector<std::string> untouched;  // folders whose files are real: devices, caches, Maya's own
  std::vector<std::string> temporary;  // folders in which new files are real, and older ones are protected
  timespec begun{};                    // when the run began: temporary files from before are somebody's
  std::atomic<uint8_t>* written{};     // shared by all processes: whether the overlay has anything at all
};

std::atomic<const Settings*> settings{nullptr};  // never freed: another thread may still use the old ones

bool below(const std::string& path, const std::string& folder) {
  return path.compare(0, folder.size(), folder) == 0 && (path.size() == folder.size() || path[folder.size()] == '/');
}

bool below_any(const std::string& path, const std::vector<std::string>& folders) {
  for (const auto& folder : folders)
    if (below(path, folder)) return true;
  return false;
}

// ---- paths ----

// A path with the overlay's own prefix taken off: the place that it stands for.
std::string as_seen(const Settings& own, std::string path) {
  return below(path, own.files) ? path.substr(own.files.size()).insert(0, path.size() == own.files.size() ? "/" : "")
                                : path;
}

std::string folder_of(const std::string& path) {
  auto slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string at_descriptor(int descriptor) {
  char name[64], target[PATH_MAX];
  snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
  auto length = readlink(name, target, sizeof target - 1);
  return length > 0 && target[0] == '/' ? std::string(target, length) : "";
}

std::string working_folder() {
  char here[PATH_MAX];
  return getcwd(here, sizeof here) ? here : "";
}

// The path that is meant, from the root; empty if it cannot be told.
std::string absolute(const Settings& own, int folder, const char* path) {
  if (path[0] == '/') return as_seen(own, path);
  auto base = as_seen(own, folder == AT_FDCWD ? working_folder() : at_descriptor(folder));
  if (base.empty()) return "";
  return path[0] ? base + (base == "/" ? "" : "/") + path : base;
}

bool exists(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0;
}

bool is_folder(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

// Whether the real file of that path, or a folder above it, was removed.
bool removed(const Settings& own, const std::string& path) {
  if (access(own.gone.c_str(), F_OK) != 0) return false;
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    auto above = own.gone + path.substr(0, end);
    if (access((above + "/.gone").c_str(), F_OK) == 0) return true;
    if (end == std::string::npos || access(above.c_str(), F_OK) != 0) return false;
  }
}

struct Place {
  std::string path;            // as the program sees it, without links
  bool upper = false;          // something stands there in the overlay
  bool lower = false;          // and in the real place, where it has not been removed
  std::string actual() const;  // where to read it
  bool there() const { return upper || lower; }
};

thread_local const Settings* in_use = nullptr;  // by the function that is being called

std::string upper_of(const std::string& path) { return in_use->files + path; }

std::string Place::actual() const {
  // A folder that stands in both trees is read as the real one; its entries are those of both.
  return upper && !(lower && is_folder(path)) ? upper_of(path) : path;
}

Place look(const std::string& path) {
  Place found{path};
  found.upper = exists(upper_of(path));
  found.lower = exists(path) && !removed(*in_use, path);
  return found;
}

std::string target_of(const std::string& path) {
  char target[PATH_MAX];
  auto length = readlink(path.c_str(), target, sizeof target - 1);
  return length > 0 ? std::string(target, length) : "";
}

// Follows the links in a path, in both trees. The last part is followed if `follow`.
Place resolve(const std::string& wanted, bool follow) {
  std::vector<std::string> left;  // parts that are still to be walked, the next one last
  auto push = [&](const std::string& path) {
    std::vector<std::string> parts;
    for (size_t begin = 0; begin < path.size();) {
      auto end = path.find('/', begin);
      if (end == std::string::npos) end = path.size();
      if (end > begin) parts.push_back(path.substr(begin, end - begin));
      begin = end + 1;
    }
    left.insert(left.end(), parts.rbegin(), parts.rend());
  };
  push(wanted);
  bool as_folder = !wanted.empty() && wanted.back() == '/';
  std::string walked;
  Place place{"/", false, true};
  for (int links = 0; !left.empty();) {
    auto part = left.back();
    left.pop_back();
    if (part == ".") continue;
    if (part == "..") {
      walked = walked.empty() ? "" : folder_of(walked) == "/" ? "" : folder_of(walked);
      place = walked.empty() ? Place{"/", false, true} : look(walked);
      continue;
    }
    place = look(walked + "/" + part);
    bool last = left.empty();
    if (place.there() && (!last || follow || as_folder)) {
      auto target = target_of(place.upper ? upper_of(place.path) : place.path);
      if (!target.empty() && ++links <= 40) {
        if (target[0] == '/') walked.clear();
        push(target);
        place = walked.empty() ? Place{"/", false, true} : look(walked);
        continue;
      }
    }
    walked = place.path;
  }
  return place;
}

// ---- what is done with a path ----

enum class Way { PASS, UNION };  // leave the call as it is, or answer it from both trees

// Calls that only read pass while the overlay is empty.
struct Call {
  Way way = Way::PASS;
  Place place;

  Call(int folder, const char* path, bool follow, bool writes) {
    auto* own = settings.load(std::memory_order_acquire);
    if (own == nullptr || path == nullptr || !path[0]) return;
    if (!writes && !own->written->load(std::memory_order_relaxed)) return;
    in_use = own;
    auto wanted = absolute(*own, folder, path);
    if (wanted.empty() || below_any(wanted, own->untouched) || wanted.find("/__pycache__") != std::string::npos) return;
    place = resolve(wanted, follow);
    // A link may lead to a folder that is not touched.
    if (!below_any(place.path, own->untouched)) way = Way::UNION;
  }

  bool passes() const { return way == Way::PASS; }
};

// Whether it was there when the run began. File systems that do not know when a file was made know when it was last
// changed.
bool older_than_run(const std::string& path) {
  struct statx found;
  if (statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BTIME | STATX_CTIME, &found) != 0) return false;
  auto& at = found.stx_mask & STATX_BTIME ? found.stx_btime : found.stx_ctime;
  auto& begun = in_use->begun;
  return at.tv_sec < begun.tv_sec || (at.tv_sec == begun.tv_sec && at.tv_nsec < begun.tv_nsec);
}

// Whether a change of that place goes to the overlay. In temporary folders, what is new is real, because other programs
// may need it.
bool is_protected(const Place& place) {
  if (place.upper || below(place.path, in_use->working)) return true;
  for (const auto& folder : in_use->temporary) {
    if (!below(place.path, folder)) continue;
    auto child = place.path.substr(0, place.path.find('/', folder.size() + 1));  // of the temporary folder
    return older_than_run(child) || exists(upper_of(child));
  }
  return true;
}

bool make_folders(const std::string& path) {
  if (mkdir(path.c_str(), 0777) == 0 || errno == EEXIST) return true;
  if (errno != ENOENT || !make_folders(folder_of(path))) return false;
  return mkdir(path.c_str(), 0777) == 0 || errno == EEXIST;
}

void begin_writing() { in_use->written->store(1, std::memory_order_relaxed); }

// Makes the folders in the overlay that a new file needs. False, with errno, if there is no such folder for the
// program.
bool prepare(const Place& place) {
  auto above = folder_of(place.path);
  auto found = look(above);
  if (above != "/" && !found.there()) {
    errno = ENOENT;
    return false;
  }
  if (above != "/" && !is_folder(found.actual())) {
    errno = ENOTDIR;
    return false;
  }
  if (found.lower && !found.upper && access(above.c_str(), W_OK) != 0)
    return false;  // nor could the program write there
  begin_writing();
  return make_folders(upper_of(above));
}

constexpr off_t LARGEST_COPY =
    off_t(4) << 30;  // bytes of a file that is copied because the program changes a part of it

bool copy(const std::string& from, const std::string& to) {
  int source = open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (source < 0) return false;
  struct stat found;
  fstat(source, &found);
  int target = open(to.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, found.st_mode & 07777);
  bool done = target >= 0;
  if (done && ioctl(target, FICLONE, source) != 0) {
    if (found.st_size > LARGEST_COPY) {
      errno = EROFS;
      done = false;
    }
    for (ssize_t moved = 1; done && moved > 0;) {
      moved = copy_file_range(source, nullptr, target, nullptr, size_t(1) << 30, 0);
      if (moved < 0 && (errno == EXDEV || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)) {
        char block[1 << 16];
        while ((moved = read(source, block, sizeof block)) > 0)
          if (write(target, block, moved) != moved) moved = -1;
      }
      done = moved >= 0;
    }
  }
  int error = errno;
  close(source);
  if (target >= 0) {
    close(target);
    if (!done) unlink(to.c_str());
  }
  errno = error;
  return done;
}

// Brings a real file or link into the overlay, so that it can be changed there.
bool bring(const Place& place) {
  if (place.upper) return true;
  if (!prepare(place)) return false;
  auto target = target_of(place.path);
  if (!target.empty()) return symlink(target.c_str(), upper_of(place.path).c_str()) == 0;
  return copy(place.path, upper_of(place.path));
}

void mark_removed(const std::string& path) {
  begin_writing();
  auto folder = in_use->gone + path;
  make_folders(folder);
  int mark = open((folder + "/.gone").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (mark >= 0) close(mark);
}

int fails(int error) {
  errno = error;
  return -1;
}

// ---- opening ----

int open_at(int folder, const char* path, int flags, mode_t mode) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
  Call call(folder, path, !(flags & (O_NOFOLLOW | O_EXCL)), writes);
  if (call.passes()) return openat(folder, path, flags, mode);
  auto& place = call.place;
  struct stat found{};
  auto actual = place.actual();
  bool plain =
      !place.there() || (lstat(actual.c_str(), &found) == 0 && (S_ISREG(found.st_mode) || S_ISLNK(found.st_mode)));
  bool changes = (flags & O_ACCMODE) != O_RDONLY || (flags & O_TRUNC) || ((flags & O_CREAT) && !place.there());
  if (!changes || !plain) {
    if (!place.there() && !exists(place.path)) return openat(folder, path, flags, mode);  // fails as it really does
    if (!place.there()) return fails(ENOENT);
    return open(actual.c_str(), flags, mode);
  }
  if (!is_protected(place)) return openat(folder, path, flags, mode);
  if (!place.there() && !(flags & O_CREAT)) return fails(ENOENT);
  if (place.there() && (flags & O_CREAT) && (flags & O_EXCL)) return fails(EEXIST);
  if (place.lower && !place.upper) {
    if (access(place.path.c_str(), W_OK) != 0) return -1;
    if (flags & O_TRUNC ? !prepare(place) : !bring(place)) return -1;
    flags |= O_CREAT;
    mode = found.st_mode & 07777;
  } else if (!place.there() && !prepare(place)) {
    return -1;
  }
  return open(upper_of(place.path).c_str(), flags, mode);
}

mode_t mode_argument(int flags, va_list arguments) {
  return flags & (O_CREAT | O_TMPFILE) ? mode_t(va_arg(arguments, int)) : 0;
}

int w_open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto mode = mode_argument(flags, arguments);
  va_end(arguments);
  return open_at(AT_FDCWD, path, flags, mode);
}

int w_openat(int folder, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  auto mode = mode_argument(flags, arguments);
  va_end(arguments);
  return open_at(folder, path, flags, mode);
}

int w_open_2(const char* path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int w_openat_2(int folder, const char* path, int flags) { return open_at(folder, path, flags, 0); }
int w_creat(const char* path, mode_t mode) { return open_at(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

// The flags of a mode such as "r+b"; -1 if it is none.
int flags_of(const char* mode) {
  bool both = strchr(mode, '+') != nullptr;
  int flags = both ? O_RDWR : mode[0] == 'r' ? O_RDONLY : O_WRONLY;
  if (mode[0] == 'w') flags |= O_CREAT | O_TRUNC;
  if (mode[0] == 'a') flags |= O_CREAT | O_APPEND;
  if (strchr(mode, 'x')) flags |= O_EXCL;
  if (strchr(mode, 'e')) flags |= O_CLOEXEC;
  return strchr("rwa", mode[0]) ? flags : -1;
}

FILE* w_fopen(const char* path, const char* mode) {
  int flags = settings.load() == nullptr ? -1 : flags_of(mode);
  if (flags < 0) return fopen(path, mode);
  int file = open_at(AT_FDCWD, path, flags, 0666);
  if (file < 0) return nullptr;
  auto* stream = fdopen(file, mode);
  if (stream == nullptr) close(file);
  return stream;
}

FILE* w_freopen(const char* path, const char* mode, FILE* stream) {
  int flags = path == nullptr || settings.load() == nullptr ? -1 : flags_of(mode);
  if (flags < 0) return freopen(path, mode, stream);
  int file = open_at(AT_FDCWD, path, flags | O_CLOEXEC, 0666);
  if (file < 0) return nullptr;
  char name[64];
  snprintf(name, sizeof name, "/proc/self/fd/%d", file);
  auto* again = freopen(name, mode[0] == 'w' ? "r+" : mode, stream);  // it is empty already
  close(file);
  return again;
}

// ---- calls that read ----

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

int w_fstatat(int folder, const char* path, struct stat* found, int flags) {
  if ((flags & AT_EMPTY_PATH) && path && !path[0]) return fstatat(folder, path, found, flags);
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return fstatat(at, where, found, flags); });
}

int w_stat(const char* path, struct stat* found) { return w_fstatat(AT_FDCWD, path, found, 0); }
int w_lstat(const char* path, struct stat* found) { return w_fstatat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int w_xstat(int, const char* path, struct stat* found) { return w_stat(path, found); }
int w_lxstat(int, const char* path, struct stat* found) { return w_lstat(path, found); }
int w_fxstatat(int, int folder, const char* path, struct stat* found, int flags) {
  return w_fstatat(folder, path, found, flags);
}

int w_statx(int folder, const char* path, int flags, unsigned mask, struct statx* found) {
  if (path == nullptr || ((flags & AT_EMPTY_PATH) && !path[0])) return statx(folder, path, flags, mask, found);
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return statx(at, where, flags, mask, found); });
}

int w_faccessat(int folder, const char* path, int mode, int flags) {
  return read_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                 [=](int at, const char* where) { return faccessat(at, where, mode, flags); });
}

int w_access(const char* path, int mode) { return w_faccessat(AT_FDCWD, path, mode, 0); }
int w_eaccess(const char* path, int mode) { return w_faccessat(AT_FDCWD, path, mode, AT_EACCESS); }

ssize_t w_readlinkat(int folder, const char* path, char* target, size_t size) {
  if (path && !path[0]) return readlinkat(folder, path, target, size);
  return read_at(folder, path, false, [=](int at, const char* where) { return readlinkat(at, where, target, size); });
}

ssize_t w_readlink(const char* path, char* target, size_t size) { return w_readlinkat(AT_FDCWD, path, target, size); }
ssize_t w_readlink_chk(const char* path, char* target, size_t size, size_t) { return w_readlink(path, target, size); }
ssize_t w_readlinkat_chk(int folder, const char* path, char* target, size_t size, size_t) {
  return w_readlinkat(folder, path, target, size);
}

int w_statfs(const char* path, struct statfs* found) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return statfs(where, found); });
}

int w_statvfs(const char* path, struct statvfs* found) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return statvfs(where, found); });
}

ssize_t w_getxattr(const char* path, const char* name, void* value, size_t size) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return getxattr(where, name, value, size); });
}

ssize_t w_lgetxattr(const char* path, const char* name, void* value, size_t size) {
  return read_at(AT_FDCWD, path, false, [=](int, const char* where) { return lgetxattr(where, name, value, size); });
}

ssize_t w_listxattr(const char* path, char* names, size_t size) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return listxattr(where, names, size); });
}

ssize_t w_llistxattr(const char* path, char* names, size_t size) {
  return read_at(AT_FDCWD, path, false, [=](int, const char* where) { return llistxattr(where, names, size); });
}

int w_chdir(const char* path) {
  return read_at(AT_FDCWD, path, true, [](int, const char* where) { return chdir(where); });
}

char* w_getcwd(char* here, size_t size) {
  auto* own = settings.load(std::memory_order_acquire);
  auto* real = getcwd(here, size);
  if (own == nullptr || real == nullptr || !below(real, own->files)) return real;
  auto seen = as_seen(*own, real);
  memcpy(real, seen.c_str(), seen.size() + 1);
  return real;
}

char* w_getcwd_chk(char* here, size_t size, size_t) { return w_getcwd(here, size); }

char* w_realpath(const char* path, char* resolved) {
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return realpath(path, resolved);
  if (!call.place.there()) {
    errno = ENOENT;
    return nullptr;
  }
  if (resolved == nullptr) return strdup(call.place.path.c_str());
  if (call.place.path.size() >= PATH_MAX) {
    errno = ENAMETOOLONG;
    return nullptr;
  }
  return strcpy(resolved, call.place.path.c_str());
}

char* w_realpath_chk(const char* path, char* resolved, size_t) { return w_realpath(path, resolved); }
char* w_canonical(const char* path) { return w_realpath(path, nullptr); }

int w_execve(const char* path, char* const arguments[], char* const environment[]) {
  return read_at(AT_FDCWD, path, true, [=](int, const char* where) { return execve(where, arguments, environment); });
}

// ---- folders ----

// A listing of both trees. The first stream is the one that the program holds.
struct Listing {
  std::string path;
  DIR* second;
  bool first_is_real;
  std::set<std::string> seen;
  bool in_second = false;
};

std::mutex listings_lock;
std::map<DIR*, Listing> listings;
std::atomic<int> open_listings{0};

// Adds the other tree to a stream of one of them, where there is something to add or to hide.
DIR* listed(DIR* first, const std::string& path, bool first_is_real, bool other) {
  if (first == nullptr) return nullptr;
  auto hides = access((in_use->gone + path).c_str(), F_OK) == 0;
  if (!other && !(first_is_real && hides)) return first;
  auto* second = other ? opendir(first_is_real ? upper_of(path).c_str() : path.c_str()) : nullptr;
  std::lock_guard lock(listings_lock);
  listings[first] = {path, second, first_is_real, {}};
  ++open_listings;
  return first;
}

DIR* w_opendir(const char* path) {
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return opendir(path);
  auto& place = call.place;
  if (!place.there()) {
    errno = ENOENT;
    return nullptr;
  }
  bool both = place.lower && place.upper && is_folder(place.path);
  return listed(opendir(place.actual().c_str()), place.path, place.lower && (both || !place.upper), both);
}

DIR* w_fdopendir(int folder) {
  auto* own = settings.load(std::memory_order_acquire);
  auto real = own == nullptr || !own->written->load() ? "" : at_descriptor(folder);
  if (real.empty() || (below_any(real, own->untouched) && !below(real, own->files))) return fdopendir(folder);
  in_use = own;
  auto place = look(as_seen(*own, real));
  bool is_real = !below(real, own->files);
  return listed(fdopendir(folder), place.path, is_real, is_real ? place.upper : place.lower && is_folder(place.path));
}

struct dirent* w_readdir(DIR* stream) {
  if (!open_listings.load()) return readdir(stream);
  std::lock_guard lock(listings_lock);
  auto found = listings.find(stream);
  auto* own = settings.load(std::memory_order_acquire);
  if (found == listings.end() || own == nullptr) return readdir(stream);
  in_use = own;
  auto& listing = found->second;
  int before = errno;  // which tells the end from an error
  while (true) {
    errno = before;
    auto* entry = listing.in_second ? readdir(listing.second) : readdir(stream);
    if (entry == nullptr) {
      if (errno != before || listing.in_second || listing.second == nullptr) return nullptr;
      listing.in_second = true;
      continue;
    }
    bool real = listing.first_is_real != listing.in_second;
    std::string name = entry->d_name;
    bool dots = name == "." || name == "..";
    if (listing.in_second && dots) continue;
    auto path = (listing.path == "/" ? "" : listing.path) + "/" + name;
    if (real && !dots && access((own->gone + path + "/.gone").c_str(), F_OK) == 0 &&
        (listing.in_second || !exists(upper_of(path))))
      continue;
    if (!listing.seen.insert(name).second) continue;
    errno = before;
    return entry;
  }
}

int w_closedir(DIR* stream) {
  if (open_listings.load()) {
    std::lock_guard lock(listings_lock);
    if (auto found = listings.find(stream); found != listings.end()) {
      if (found->second.second) closedir(found->second.second);
      listings.erase(found);
      --open_listings;
    }
  }
  return closedir(stream);
}

void w_rewinddir(DIR* stream) {
  rewinddir(stream);
  if (!open_listings.load()) return;
  std::lock_guard lock(listings_lock);
  if (auto found = listings.find(stream); found != listings.end()) {
    if (found->second.second) rewinddir(found->second.second);
    found->second.seen.clear();
    found->second.in_second = false;
  }
}

std::vector<std::string> entries(const std::string& path) {
  std::vector<std::string> found;
  auto* stream = w_opendir(path.c_str());
  if (stream == nullptr) return found;
  while (auto* entry = w_readdir(stream))
    if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) found.emplace_back(entry->d_name);
  w_closedir(stream);
  return found;
}

int w_scandir(const char* path, struct dirent*** names, int (*keeps)(const struct dirent*),
              int (*compare)(const struct dirent**, const struct dirent**)) {
  auto* stream = w_opendir(path);
  if (stream == nullptr) return -1;
  std::vector<struct dirent*> found;
  while (auto* entry = w_readdir(stream)) {
    if (keeps && !keeps(entry)) continue;
    auto* kept = static_cast<struct dirent*>(malloc(entry->d_reclen));
    memcpy(kept, entry, entry->d_reclen);
    found.push_back(kept);
  }
  w_closedir(stream);
  *names = static_cast<struct dirent**>(malloc(sizeof(struct dirent*) * (found.size() + 1)));
  std::copy(found.begin(), found.end(), *names);
  if (compare)
    qsort(*names, found.size(), sizeof(struct dirent*), reinterpret_cast<int (*)(const void*, const void*)>(compare));
  return int(found.size());
}

int w_mkdirat(int folder, const char* path, mode_t mode) {
  Call call(folder, path, false, true);
  if (call.passes() || (!call.place.there() && !is_protected(call.place))) return mkdirat(folder, path, mode);
  if (call.place.there()) return fails(EEXIST);
  if (!prepare(call.place)) return -1;
  return mkdir(upper_of(call.place.path).c_str(), mode);
}

int w_mkdir(const char* path, mode_t mode) { return w_mkdirat(AT_FDCWD, path, mode); }

// ---- removing and renaming ----

int remove_file(int folder, const char* path) {
  Call call(folder, path, false, true);
  auto& place = call.place;
  if (call.passes() || (place.lower && !is_protected(place))) return unlinkat(folder, path, 0);
  if (!place.there()) return fails(ENOENT);
  if (is_folder(place.actual())) return fails(EISDIR);
  if (place.upper && unlink(upper_of(place.path).c_str()) != 0) return -1;
  if (place.lower) mark_removed(place.path);
  return 0;
}

int remove_folder(int folder, const char* path) {
  Call call(folder, path, false, true);
  auto& place = call.place;
  if (call.passes() || (place.lower && !is_protected(place))) return unlinkat(folder, path, AT_REMOVEDIR);
  if (!place.there()) return fails(ENOENT);
  if (!is_folder(place.actual())) return fails(ENOTDIR);
  if (!entries(place.path).empty()) return fails(ENOTEMPTY);
  auto* own = in_use = settings.load(std::memory_order_acquire);
  if (own == nullptr) return fails(EBUSY);
  if (place.upper && rmdir(upper_of(place.path).c_str()) != 0) return -1;
  if (place.lower) mark_removed(place.path);
  return 0;
}

int w_unlinkat(int folder, const char* path, int flags) {
  return flags & AT_REMOVEDIR ? remove_folder(folder, path) : remove_file(folder, path);
}

int w_unlink(const char* path) { return remove_file(AT_FDCWD, path); }
int w_rmdir(const char* path) { return remove_folder(AT_FDCWD, path); }

int w_remove(const char* path) {
  int done = remove_file(AT_FDCWD, path);
  return done != 0 && errno == EISDIR ? remove_folder(AT_FDCWD, path) : done;
}

// A folder is renamed if it stands in the overlay alone; otherwise the program is told, as by overlayfs, to copy it
// (EXDEV).
int rename_at(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Call source(from_folder, from, false, true), target(to_folder, to, false, true);
  if (source.passes() && target.passes()) return renameat2(from_folder, from, to_folder, to, flags);
  auto &old = source.place, &next = target.place;
  bool moves = !source.passes() && is_protected(old), covers = !target.passes() && is_protected(next);
  if (!moves && !covers) return renameat2(from_folder, from, to_folder, to, flags);
  if (source.passes() || target.passes()) return fails(EXDEV);
  if (!old.there()) return fails(ENOENT);
  if (flags & ~unsigned(RENAME_NOREPLACE)) return fails(EINVAL);
  if ((flags & RENAME_NOREPLACE) && next.there()) return fails(EEXIST);
  if (old.path == next.path) return 0;
  auto upper = upper_of(next.path);
  if (is_folder(old.actual())) {
    if (old.lower) return fails(EXDEV);
    if (next.there() && !is_folder(next.actual())) return fails(ENOTDIR);
    if (next.there() && !entries(next.path).empty()) return fails(ENOTEMPTY);
    in_use = settings.load(std::memory_order_acquire);
    if (in_use == nullptr) return fails(EBUSY);
    if (next.lower) mark_removed(next.path);  // it is empty, and stays so below the renamed one
    return prepare(next) ? rename(upper_of(old.path).c_str(), upper.c_str()) : -1;
  }
  if (next.there() && is_folder(next.actual())) return fails(EISDIR);
  if (!prepare(next)) return -1;
  if (old.upper) {
    if (rename(upper_of(old.path).c_str(), upper.c_str()) != 0) return -1;
  } else {
    auto link = target_of(old.path);
    unlink(upper.c_str());
    if (link.empty() ? !copy(old.path, upper) : symlink(link.c_str(), upper.c_str()) != 0) return -1;
  }
  if (old.lower && !moves) return unlink(old.path.c_str());  // a new temporary file
  if (old.lower) mark_removed(old.path);
  return 0;
}

int w_renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  return rename_at(from_folder, from, to_folder, to, flags);
}
int w_renameat(int from_folder, const char* from, int to_folder, const char* to) {
  return rename_at(from_folder, from, to_folder, to, 0);
}
int w_rename(const char* from, const char* to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }

int w_linkat(int from_folder, const char* from, int to_folder, const char* to, int flags) {
  Call source(from_folder, from, flags & AT_SYMLINK_FOLLOW, true), target(to_folder, to, false, true);
  bool covers = !target.passes() && is_protected(target.place);
  if (!covers && (source.passes() || !source.place.upper)) return linkat(from_folder, from, to_folder, to, flags);
  if (source.passes() || target.passes()) return fails(EXDEV);
  if (!source.place.there()) return fails(ENOENT);
  if (target.place.there()) return fails(EEXIST);
  if (!prepare(target.place)) return -1;
  auto upper = upper_of(target.place.path);
  if (source.place.upper) return link(upper_of(source.place.path).c_str(), upper.c_str());
  return copy(source.place.path, upper) ? 0 : -1;
}

int w_link(const char* from, const char* to) { return w_linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

// Makes something new at a path: `act` makes it in the overlay, `pass` in the real place.
template <typename Act, typename Pass>
int make_at(int folder, const char* path, Act act, Pass pass) {
  Call call(folder, path, false, true);
  if (call.passes() || (!call.place.there() && !is_protected(call.place))) return pass();
  if (call.place.there()) return fails(EEXIST);
  if (!prepare(call.place)) return -1;
  return act(upper_of(call.place.path).c_str());
}

int w_symlinkat(const char* target, int folder, const char* path) {
  return make_at(
      folder, path, [=](const char* where) { return symlink(target, where); },
      [=] { return symlinkat(target, folder, path); });
}

int w_symlink(const char* target, const char* path) { return w_symlinkat(target, AT_FDCWD, path); }

int w_mkfifoat(int folder, const char* path, mode_t mode) {
  return make_at(
      folder, path, [=](const char* where) { return mkfifo(where, mode); },
      [=] { return mkfifoat(folder, path, mode); });
}

int w_mkfifo(const char* path, mode_t mode) { return w_mkfifoat(AT_FDCWD, path, mode); }

// ---- changing what a file is ----

// Runs `act` on the overlay's copy of a file. Folders keep what they are.
template <typename Act>
int change_at(int folder, const char* path, bool follow, Act act) {
  Call call(folder, path, follow, true);
  auto& place = call.place;
  if (call.passes() || (place.there() && !is_protected(place))) return act(folder, path);
  if (!place.there()) return fails(ENOENT);
  if (place.lower && is_folder(place.path)) return 0;
  if (!bring(place)) return -1;
  return act(AT_FDCWD, upper_of(place.path).c_str());
}

int w_truncate(const char* path, off_t length) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return truncate(where, length); });
}

int w_fchmodat(int folder, const char* path, mode_t mode, int flags) {
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return fchmodat(at, where, mode, flags); });
}

int w_chmod(const char* path, mode_t mode) { return w_fchmodat(AT_FDCWD, path, mode, 0); }

int w_fchownat(int folder, const char* path, uid_t user, gid_t group, int flags) {
  if ((flags & AT_EMPTY_PATH) && path && !path[0]) return fchownat(folder, path, user, group, flags);
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return fchownat(at, where, user, group, flags); });
}

int w_chown(const char* path, uid_t user, gid_t group) { return w_fchownat(AT_FDCWD, path, user, group, 0); }
int w_lchown(const char* path, uid_t user, gid_t group) {
  return w_fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}

int w_utimensat(int folder, const char* path, const timespec times[2], int flags) {
  if (path == nullptr || !path[0]) return utimensat(folder, path, times, flags);
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return utimensat(at, where, times, flags); });
}

int w_utimes(const char* path, const timeval times[2]) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return utimes(where, times); });
}

int w_lutimes(const char* path, const timeval times[2]) {
  return change_at(AT_FDCWD, path, false, [=](int, const char* where) { return lutimes(where, times); });
}

int w_utime(const char* path, const utimbuf* times) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return utime(where, times); });
}

int w_setxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  return change_at(AT_FDCWD, path, true,
                   [=](int, const char* where) { return setxattr(where, name, value, size, flags); });
}

int w_lsetxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  return change_at(AT_FDCWD, path, false,
                   [=](int, const char* where) { return lsetxattr(where, name, value, size, flags); });
}

int w_removexattr(const char* path, const char* name) {
  return change_at(AT_FDCWD, path, true, [=](int, const char* where) { return removexattr(where, name); });
}

// ---- replacing addresses ----

void redirect_all();

void* w_dlopen(const char* path, int flags) {
  void* loaded = nullptr;
  Call call(AT_FDCWD, path && strchr(path, '/') ? path : nullptr, true, false);
  auto actual = call.passes() ? "" : call.place.actual();
  loaded = dlopen(call.passes() ? path : actual.c_str(), flags);
  if (loaded && settings.load() && !(flags & RTLD_NOLOAD)) redirect_all();
  return loaded;
}

template <typename Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::unordered_map<std::string, void*>& replacements() {
  static const std::unordered_map<std::string, void*> table{
      {"open", address(w_open)},
      {"open64", address(w_open)},
      {"__open_2", address(w_open_2)},
      {"__open64_2", address(w_open_2)},
      {"openat", address(w_openat)},
      {"openat64", address(w_openat)},
      {"__openat_2", address(w_openat_2)},
      {"__openat64_2", address(w_openat_2)},
      {"creat", address(w_creat)},
      {"creat64", address(w_creat)},
      {"fopen", address(w_fopen)},
      {"fopen64", address(w_fopen)},
      {"freopen", address(w_freopen)},
      {"freopen64", address(w_freopen)},
      {"stat", address(w_stat)},
      {"stat64", address(w_stat)},
      {"lstat", address(w_lstat)},
      {"lstat64", address(w_lstat)},
      {"fstatat", address(w_fstatat)},
      {"fstatat64", address(w_fstatat)},
      {"__xstat", address(w_xstat)},
      {"__xstat64", address(w_xstat)},
      {"__lxstat", address(w_lxstat)},
      {"__lxstat64", address(w_lxstat)},
      {"__fxstatat", address(w_fxstatat)},
      {"__fxstatat64", address(w_fxstatat)},
      {"statx", address(w_statx)},
      {"access", address(w_access)},
      {"faccessat", address(w_faccessat)},
      {"eaccess", address(w_eaccess)},
      {"euidaccess", address(w_eaccess)},
      {"readlink", address(w_readlink)},
      {"__readlink_chk", address(w_readlink_chk)},
      {"readlinkat", address(w_readlinkat)},
      {"__readlinkat_chk", address(w_readlinkat_chk)},
      {"statfs", address(w_statfs)},
      {"statfs64", address(w_statfs)},
      {"statvfs", address(w_statvfs)},
      {"statvfs64", address(w_statvfs)},
      {"getxattr", address(w_getxattr)},
      {"lgetxattr", address(w_lgetxattr)},
      {"listxattr", address(w_listxattr)},
      {"llistxattr", address(w_llistxattr)},
      {"chdir", address(w_chdir)},
      {"getcwd", address(w_getcwd)},
      {"__getcwd_chk", address(w_getcwd_chk)},
      {"realpath", address(w_realpath)},
      {"__realpath_chk", address(w_realpath_chk)},
      {"canonicalize_file_name", address(w_canonical)},
      {"execve", address(w_execve)},
      {"opendir", address(w_opendir)},
      {"fdopendir", address(w_fdopendir)},
      {"readdir", address(w_readdir)},
      {"readdir64", address(w_readdir)},
      {"closedir", address(w_closedir)},
      {"rewinddir", address(w_rewinddir)},
      {"scandir", address(w_scandir)},
      {"scandir64", address(w_scandir)},
      {"mkdir", address(w_mkdir)},
      {"mkdirat", address(w_mkdirat)},
      {"unlink", address(w_unlink)},
      {"unlinkat", address(w_unlinkat)},
      {"rmdir", address(w_rmdir)},
      {"remove", address(w_remove)},
      {"rename", address(w_rename)},
      {"renameat", address(w_renameat)},
      {"renameat2", address(w_renameat2)},
      {"link", address(w_link)},
      {"linkat", address(w_linkat)},
      {"symlink", address(w_symlink)},
      {"symlinkat", address(w_symlinkat)},
      {"mkfifo", address(w_mkfifo)},
      {"mkfifoat", address(w_mkfifoat)},
      {"truncate", address(w_truncate)},
      {"truncate64", address(w_truncate)},
      {"chmod", address(w_chmod)},
      {"fchmodat", address(w_fchmodat)},
      {"chown", address(w_chown)},
      {"lchown", address(w_lchown)},
      {"fchownat", address(w_fchownat)},
      {"utimensat", address(w_utimensat)},
      {"utimes", address(w_utimes)},
      {"lutimes", address(w_lutimes)},
      {"utime", address(w_utime)},
      {"setxattr", address(w_setxattr)},
      {"lsetxattr", address(w_lsetxattr)},
      {"removexattr", address(w_removexattr)},
      {"dlopen", address(w_dlopen)},
  };
  return table;
}

struct Replaced {
  std::string object;
  ElfW(Addr) base;
  void** slot;
  void* before;
};

std::mutex tables_lock;
std::vector<Replaced> replaced;
std::set<std::pair<ElfW(Addr), std::string>> done_objects;

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
      if (*slot == nullptr) continue;  // a weak symbol that this C library does not have
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

std::atomic<uint8_t>* shared_flag(const std::string& path) {
  int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, 1) != 0) return nullptr;
  auto* flag = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return flag == MAP_FAILED ? nullptr : static_cast<std::atomic<uint8_t>*>(flag);
}

}  // namespace

// `text` has a line for each setting: NAME=VALUE. Returns 0, or an errno.
extern "C" int maya_overlay_start(const char* text) {
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
  own->untouched.push_back(folder);
  own->written = folder.empty() ? nullptr : shared_flag(folder + "/written");
  if (own->written == nullptr) return errno ? errno : EINVAL;
  settings.store(own, std::memory_order_release);
  redirect_all();
  return 0;
}

extern "C" void maya_overlay_stop() {
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
