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
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
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
  std::string coming;                  // the beginning of names of files that are not complete yet
  std::string variable, library;       // what children need: MAYA_OVERLAY=..., and the path of this library
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

// Whether files of that path are real. The program's folder counts if it is below a folder of real files.
bool untouched(const Settings& own, const std::string& path) {
  for (const auto& folder : own.untouched)
    if (below(path, folder) && !(below(own.working, folder) && below(path, own.working))) return true;
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

// What stands at a path, as the bits of its mode; 0 if nothing does.
mode_t kind_of(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0 ? found.st_mode : 0;
}

bool exists(const std::string& path) { return kind_of(path) != 0; }

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
  bool link = false;           // it is a symbolic link
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
  auto upper = kind_of(upper_of(path)), lower = kind_of(path);
  if (lower && removed(*in_use, path)) lower = 0;
  return {path, upper != 0, lower != 0, bool(S_ISLNK(upper ? upper : lower))};
}

// Looks at the parts of a path from the root. Below a folder that the overlay's trees do not have, nothing is in them.
class Walk {
 public:
  Place into(const std::string& path) {
    mode_t upper = in_upper_ ? kind_of(upper_of(path)) : 0, lower = kind_of(path);
    in_upper_ = upper != 0;
    if (in_gone_ && !gone_) {
      auto folder = in_use->gone + path;
      in_gone_ = access(folder.c_str(), F_OK) == 0;
      gone_ = in_gone_ && access((folder + "/.gone").c_str(), F_OK) == 0;
    }
    if (gone_) lower = 0;
    return {path, upper != 0, lower != 0, bool(S_ISLNK(upper ? upper : lower))};
  }

 private:
  bool in_upper_ = true;
  bool in_gone_ = access(in_use->gone.c_str(), F_OK) == 0;
  bool gone_ = false;
};

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
  const Place root{"/", false, true};
  std::string walked;
  auto place = root;
  Walk walk;
  bool from_root = true;  // whether `walk` has been through what was walked
  for (int links = 0; !left.empty();) {
    auto part = left.back();
    left.pop_back();
    if (part == ".") continue;
    if (part == "..") {
      if (!place.there()) return Place{walked + "/.."};
      walked = walked.empty() || folder_of(walked) == "/" ? "" : folder_of(walked);
      place = walked.empty() ? root : look(walked);
      from_root = false;
      continue;
    }
    place = from_root ? walk.into(walked + "/" + part) : look(walked + "/" + part);
    bool last = left.empty();
    if (place.link && (!last || follow || as_folder)) {
      auto target = target_of(place.upper ? upper_of(place.path) : place.path);
      if (!target.empty() && ++links <= 40) {
        if (target[0] == '/') walked.clear();
        push(target);
        place = walked.empty() ? root : look(walked);
        from_root = walked.empty();
        walk = Walk();
        continue;
      }
    }
    walked = place.path;
  }
  return place;
}

// ---- what is done with a path ----

enum class Way { PASS, UNION };  // leave the call as it is, or answer it from both trees

// Whether Python keeps compiled modules there, beside modules of the user's. Beside the program's, they are in the
// overlay.
bool is_bytecode(const std::string& path) {
  auto at = path.find("/__pycache__");
  if (at == std::string::npos) return false;
  auto folder = resolve(path.substr(0, at), true);
  return folder.lower && !exists(upper_of(folder.path + "/__pycache__"));
}

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
    if (wanted.empty() || untouched(*own, wanted) || is_bytecode(wanted)) return;
    place = resolve(wanted, follow);
    // A link may lead to a folder that is not touched.
    if (!untouched(*own, place.path)) way = Way::UNION;
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

// Copies the parts of a file that are no holes.
bool copy_data(int source, int target, off_t size) {
  if (ftruncate(target, size) != 0) return false;
  for (off_t begin = 0, end; begin < size; begin = end) {
    auto data = lseek(source, begin, SEEK_DATA);
    if (data < 0 && errno == ENXIO) return true;  // only a hole is left
    if (data >= 0) begin = data;
    end = data < 0 ? size : lseek(source, begin, SEEK_HOLE);
    for (off_t from = begin, to = begin; from < end;) {
      auto moved = copy_file_range(source, &from, target, &to, end - from, 0);
      if (moved < 0 && (errno == EXDEV || errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP)) {
        char block[1 << 16];
        moved = pread(source, block, std::min<off_t>(sizeof block, end - from), from);
        if (moved > 0 && pwrite(target, block, moved, to) != moved) return false;
        from += moved, to += moved;
      }
      if (moved < 0) return false;
      if (moved == 0) return true;  // it is shorter now
    }
  }
  return true;
}

// Copies a file with its mode and times. `to` is complete when it appears; what another process has put there meanwhile
// stays, unless `replaces`.
bool copy(const std::string& from, const std::string& to, bool replaces = false) {
  static std::atomic<int> copies{0};
  int source = open(from.c_str(), O_RDONLY | O_CLOEXEC);
  if (source < 0) return false;
  auto coming = in_use->coming + std::to_string(getpid()) + "." + std::to_string(++copies);
  struct stat found;
  fstat(source, &found);
  int target = open(coming.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  bool done = target >= 0;
  if (done && ioctl(target, FICLONE, source) != 0) {
    errno = EROFS;
    done = off_t(found.st_blocks) * 512 <= LARGEST_COPY && copy_data(source, target, found.st_size);
  }
  if (done) {
    timespec times[2] = {found.st_atim, found.st_mtim};
    fchmod(target, found.st_mode & 07777);
    futimens(target, times);
    done =
        replaces ? rename(coming.c_str(), to.c_str()) == 0 : link(coming.c_str(), to.c_str()) == 0 || errno == EEXIST;
  }
  int error = errno;
  close(source);
  if (target >= 0) close(target);
  unlink(coming.c_str());
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
  if ((flags & O_TMPFILE) == O_TMPFILE && place.lower && is_protected(place)) {  // it may get a name later
    begin_writing();
    return make_folders(upper_of(place.path)) ? open(upper_of(place.path).c_str(), flags, mode) : -1;
  }
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

// Runs `make` with names that end, before a suffix, in random letters instead of XXXXXX, until one is new.
template <typename Make>
int make_unique(char* name, int suffix, Make make) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  auto length = ssize_t(strlen(name)) - suffix - 6;
  if (length < 0 || strncmp(name + length, "XXXXXX", 6) != 0) return fails(EINVAL);
  for (int attempt = 0; attempt < 10000; ++attempt) {
    unsigned char random[6];
    if (getrandom(random, sizeof random, 0) != sizeof random) return -1;
    for (int each = 0; each < 6; ++each) name[length + each] = letters[random[each] % (sizeof letters - 1)];
    int made = make();
    if (made >= 0 || errno != EEXIST) return made;
  }
  return -1;
}

int w_mkostemps(char* name, int suffix, int flags) {
  flags = (flags & ~O_ACCMODE) | O_RDWR | O_CREAT | O_EXCL;
  return make_unique(name, suffix, [=] { return open_at(AT_FDCWD, name, flags, 0600); });
}

int w_mkstemps(char* name, int suffix) { return w_mkostemps(name, suffix, 0); }
int w_mkostemp(char* name, int flags) { return w_mkostemps(name, 0, flags); }
int w_mkstemp(char* name) { return w_mkostemps(name, 0, 0); }

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

// ---- starting programs ----

// The environment of a child, which is in the overlay even if the program has cleared the variables for it.
class Environment {
 public:
  explicit Environment(char* const given[]) : given_(given) {
    auto* own = settings.load(std::memory_order_acquire);
    if (own == nullptr) return;
    const char *variable = nullptr, *preload = nullptr;
    for (auto* each = given; each && *each; ++each) {
      if (strncmp(*each, "MAYA_OVERLAY=", 13) == 0) variable = *each;
      if (strncmp(*each, "LD_PRELOAD=", 11) == 0) preload = *each;
    }
    auto name = own->library.substr(own->library.rfind('/') + 1);
    if (variable && preload && strstr(preload, name.c_str())) return;
    preload_ = "LD_PRELOAD=" + own->library;
    if (preload && strstr(preload, name.c_str())) preload_ = preload;
    else if (preload) preload_ += std::string(":") + (preload + 11);
    entries_ = {const_cast<char*>(variable ? variable : own->variable.c_str()), preload_.data()};
    for (auto* each = given; each && *each; ++each)
      if (*each != variable && *each != preload) entries_.push_back(*each);
    entries_.push_back(nullptr);
  }

  char* const* get() const { return entries_.empty() ? given_ : entries_.data(); }

 private:
  char* const* given_;
  std::string preload_;
  std::vector<char*> entries_;
};

int w_execve(const char* path, char* const arguments[], char* const environment[]) {
  Environment own(environment);
  return read_at(AT_FDCWD, path, true, [&](int, const char* where) { return execve(where, arguments, own.get()); });
}

int w_fexecve(int file, char* const arguments[], char* const environment[]) {
  return fexecve(file, arguments, Environment(environment).get());
}

int w_execv(const char* path, char* const arguments[]) { return w_execve(path, arguments, environ); }

// The places in which the C library looks for a program.
std::vector<std::string> places_of(const char* program) {
  if (strchr(program, '/') || !program[0]) return {program};
  std::vector<std::string> found;
  auto* set = getenv("PATH");
  std::string folders = set ? set : "/bin:/usr/bin";
  for (size_t begin = 0; begin <= folders.size();) {
    auto end = std::min(folders.find(':', begin), folders.size());
    auto folder = folders.substr(begin, end - begin);
    found.push_back(folder.empty() ? program : folder + "/" + program);
    begin = end + 1;
  }
  return found;
}

int w_execvpe(const char* program, char* const arguments[], char* const environment[]) {
  int error = ENOENT;
  for (const auto& path : places_of(program)) {
    w_execve(path.c_str(), arguments, environment);
    if (errno == ENOEXEC) {  // a script that names no interpreter
      std::vector<char*> again{const_cast<char*>("/bin/sh"), const_cast<char*>(path.c_str())};
      for (auto* each = arguments[0] ? arguments + 1 : arguments; *each; ++each) again.push_back(*each);
      again.push_back(nullptr);
      return w_execve("/bin/sh", again.data(), environment);
    }
    if (errno == EACCES) error = EACCES;
    else if (errno != ENOENT && errno != ENOTDIR) return -1;
  }
  return fails(error);
}

int w_execvp(const char* program, char* const arguments[]) { return w_execvpe(program, arguments, environ); }

std::vector<char*> rest_of(const char* first, va_list& arguments) {
  std::vector<char*> all{const_cast<char*>(first)};
  while (all.back()) all.push_back(va_arg(arguments, char*));
  return all;
}

int w_execl(const char* path, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  va_end(arguments);
  return w_execv(path, all.data());
}

int w_execlp(const char* program, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  va_end(arguments);
  return w_execvp(program, all.data());
}

int w_execle(const char* path, const char* first, ...) {
  va_list arguments;
  va_start(arguments, first);
  auto all = rest_of(first, arguments);
  auto* environment = va_arg(arguments, char* const*);
  va_end(arguments);
  return w_execve(path, all.data(), environment);
}

int w_posix_spawn(pid_t* child, const char* path, const posix_spawn_file_actions_t* actions,
                  const posix_spawnattr_t* attributes, char* const arguments[], char* const environment[]) {
  Environment own(environment);
  Call call(AT_FDCWD, path, true, false);
  if (call.passes()) return posix_spawn(child, path, actions, attributes, arguments, own.get());
  if (!call.place.there()) return ENOENT;
  return posix_spawn(child, call.place.actual().c_str(), actions, attributes, arguments, own.get());
}

int w_posix_spawnp(pid_t* child, const char* program, const posix_spawn_file_actions_t* actions,
                   const posix_spawnattr_t* attributes, char* const arguments[], char* const environment[]) {
  for (const auto& path : places_of(program)) {
    Call call(AT_FDCWD, path.c_str(), true, false);
    if (!call.passes() && call.place.upper)
      return w_posix_spawn(child, path.c_str(), actions, attributes, arguments, environment);
  }
  return posix_spawnp(child, program, actions, attributes, arguments, Environment(environment).get());
}

// The C library starts a shell with the variables of this process.
void put_variables() {
  auto* own = settings.load(std::memory_order_acquire);
  Environment with(environ);
  if (own == nullptr || with.get() == environ) return;
  for (auto* each = with.get(); each < with.get() + 2; ++each) {
    std::string entry = *each;
    auto equals = entry.find('=');
    setenv(entry.substr(0, equals).c_str(), entry.c_str() + equals + 1, 1);
  }
}

int w_system(const char* command) {
  put_variables();
  return system(command);
}

FILE* w_popen(const char* command, const char* mode) {
  put_variables();
  return popen(command, mode);
}

// ---- sockets with a path ----

// Runs `act` on an address. Longer paths than an address may have are given by a descriptor of their folder.
template <typename Act>
int at_socket(const sockaddr* address, socklen_t size, bool makes, Act act) {
  constexpr auto before = offsetof(sockaddr_un, sun_path);
  if (address == nullptr || size <= before || address->sa_family != AF_UNIX) return act(address, size);
  auto* given = reinterpret_cast<const sockaddr_un*>(address);
  std::string path(given->sun_path, strnlen(given->sun_path, size - before));
  Call call(AT_FDCWD, path.c_str(), true, makes);
  if (call.passes()) return act(address, size);
  auto& place = call.place;
  if (makes ? !place.upper && !is_protected(place) : !place.upper) return act(address, size);
  if (makes && place.there()) return fails(EADDRINUSE);
  if (makes && !prepare(place)) return -1;
  auto where = upper_of(place.path);
  int folder = -1;
  if (where.size() >= sizeof given->sun_path) {
    folder = open(folder_of(where).c_str(), O_PATH | O_CLOEXEC);
    where = "/proc/self/fd/" + std::to_string(folder) + where.substr(where.rfind('/'));
  }
  sockaddr_un real{AF_UNIX, {}};
  int done = where.size() < sizeof real.sun_path ? 0 : fails(ENAMETOOLONG);
  if (done == 0) {
    memcpy(real.sun_path, where.c_str(), where.size() + 1);
    done = act(reinterpret_cast<const sockaddr*>(&real), socklen_t(before + where.size() + 1));
  }
  int error = errno;
  if (folder >= 0) close(folder);
  errno = error;
  return done;
}

int w_bind(int socket, const sockaddr* address, socklen_t size) {
  return at_socket(address, size, true, [=](const sockaddr* at, socklen_t bytes) { return bind(socket, at, bytes); });
}

int w_connect(int socket, const sockaddr* address, socklen_t size) {
  return at_socket(address, size, false,
                   [=](const sockaddr* at, socklen_t bytes) { return connect(socket, at, bytes); });
}

// ---- copying ----

// Leaves out a hole of a file that the program copies to the end of another, such as a checkpoint. Returns its bytes;
// if there is none, lets `count` end where the next one begins.
size_t skip_hole(int from, off_t begin, int to, off_t end, size_t& count) {
  struct stat source, target;
  if (settings.load() == nullptr || begin < 0 || end < 0 || fstat(from, &source) != 0 || fstat(to, &target) != 0 ||
      !S_ISREG(source.st_mode) || !S_ISREG(target.st_mode) || off_t(source.st_blocks) * 512 >= source.st_size ||
      begin >= source.st_size || end < target.st_size)
    return 0;
  auto before = lseek(from, 0, SEEK_CUR);
  auto data = lseek(from, begin, SEEK_DATA);
  if (data < 0 && errno == ENXIO) data = source.st_size;
  auto hole = data == begin ? lseek(from, begin, SEEK_HOLE) : begin;
  lseek(from, before, SEEK_SET);
  if (data < 0 || hole < 0) return 0;
  if (data == begin) {
    count = std::min(count, size_t(hole - begin));
    return 0;
  }
  auto skipped = std::min(count, size_t(data - begin));
  return ftruncate(to, end + off_t(skipped)) == 0 ? skipped : 0;
}

ssize_t w_sendfile(int to, int from, off_t* offset, size_t count) {
  auto begin = offset ? *offset : lseek(from, 0, SEEK_CUR), end = lseek(to, 0, SEEK_CUR);
  auto skipped = skip_hole(from, begin, to, end, count);
  if (skipped == 0) return sendfile(to, from, offset, count);
  lseek(to, end + off_t(skipped), SEEK_SET);
  if (offset) *offset += off_t(skipped);
  else lseek(from, begin + off_t(skipped), SEEK_SET);
  return ssize_t(skipped);
}

ssize_t w_copy_file_range(int from, off64_t* offset, int to, off64_t* target, size_t count, unsigned flags) {
  auto begin = offset ? *offset : lseek(from, 0, SEEK_CUR), end = target ? *target : lseek(to, 0, SEEK_CUR);
  auto skipped = skip_hole(from, begin, to, end, count);
  if (skipped == 0) return copy_file_range(from, offset, to, target, count, flags);
  if (offset) *offset += off_t(skipped);
  else lseek(from, begin + off_t(skipped), SEEK_SET);
  if (target) *target += off_t(skipped);
  else lseek(to, end + off_t(skipped), SEEK_SET);
  return ssize_t(skipped);
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
  if (real.empty() || (untouched(*own, real) && !below(real, own->files))) return fdopendir(folder);
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

char* w_mkdtemp(char* name) {
  return make_unique(name, 0, [=] { return w_mkdir(name, 0700); }) == 0 ? name : nullptr;
}

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

// Copies a folder of both trees, as long as that is not more than `left` bytes.
bool copy_folder(const std::string& from, const std::string& to, off_t& left) {
  if (mkdir(to.c_str(), 0777) != 0) return false;
  for (const auto& name : entries(from)) {
    auto place = look(from + "/" + name);
    auto actual = place.actual(), next = to + "/" + name, link = target_of(actual);
    struct stat found;
    if (lstat(actual.c_str(), &found) != 0) return false;
    bool done = false;
    if (S_ISDIR(found.st_mode)) done = copy_folder(place.path, next, left);
    else if (S_ISLNK(found.st_mode)) done = symlink(link.c_str(), next.c_str()) == 0;
    else if (S_ISREG(found.st_mode) && (left -= off_t(found.st_blocks) * 512) >= 0) done = copy(actual, next);
    else errno = EXDEV;
    if (!done) return false;
  }
  return true;
}

// Makes the overlay's copy of a folder that is also real, under its new name.
bool rename_by_copying(const Place& old, const Place& next) {
  static std::atomic<int> copies{0};
  auto coming = in_use->coming + "folder." + std::to_string(getpid()) + "." + std::to_string(++copies);
  auto left = LARGEST_COPY;
  bool done = copy_folder(old.path, coming, left) && rename(coming.c_str(), upper_of(next.path).c_str()) == 0;
  int error = errno;
  std::error_code ignored;
  std::filesystem::remove_all(done ? upper_of(old.path) : coming, ignored);
  if (done) mark_removed(old.path);
  errno = error;
  return done;
}

// A folder that is too large to be copied is not renamed: the program is told, as by overlayfs, to copy it (EXDEV).
int rename_at(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  Call source(from_folder, from, false, true), target(to_folder, to, false, true);
  if (source.passes() && target.passes()) return renameat2(from_folder, from, to_folder, to, flags);
  auto &old = source.place, &next = target.place;
  bool moves = !source.passes() && is_protected(old), covers = !target.passes() && is_protected(next);
  if (!moves && !covers) return renameat2(from_folder, from, to_folder, to, flags);
  if (source.passes() && !next.there() && prepare(next))
    return renameat2(from_folder, from, AT_FDCWD, upper_of(next.path).c_str(), flags);
  if (source.passes() || target.passes()) return fails(EXDEV);
  if (!old.there()) return fails(ENOENT);
  if (flags & ~unsigned(RENAME_NOREPLACE)) return fails(EINVAL);
  if ((flags & RENAME_NOREPLACE) && next.there()) return fails(EEXIST);
  if (old.path == next.path) return 0;
  auto upper = upper_of(next.path);
  if (is_folder(old.actual())) {
    if (below(next.path, old.path)) return fails(EINVAL);
    if (next.there() && !is_folder(next.actual())) return fails(ENOTDIR);
    if (next.there() && !entries(next.path).empty()) return fails(ENOTEMPTY);
    in_use = settings.load(std::memory_order_acquire);
    if (in_use == nullptr) return fails(EBUSY);
    if (next.lower) mark_removed(next.path);  // it is empty, and stays so below the renamed one
    if (!prepare(next)) return -1;
    if (!old.lower) return rename(upper_of(old.path).c_str(), upper.c_str());
    if (!moves) return rename(old.path.c_str(), upper.c_str());  // a new temporary folder
    return rename_by_copying(old, next) ? 0 : -1;
  }
  if (next.there() && is_folder(next.actual())) return fails(EISDIR);
  if (!prepare(next)) return -1;
  if (old.upper) {
    if (rename(upper_of(old.path).c_str(), upper.c_str()) != 0) return -1;
  } else {
    if (!moves && rename(old.path.c_str(), upper.c_str()) == 0) return 0;
    auto link = target_of(old.path);
    if (!link.empty()) unlink(upper.c_str());
    if (link.empty() ? !copy(old.path, upper, true) : symlink(link.c_str(), upper.c_str()) != 0) return -1;
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
  if (target.passes()) return fails(EXDEV);
  if (!source.passes() && !source.place.there()) return fails(ENOENT);
  if (target.place.there()) return fails(EEXIST);
  if (!prepare(target.place)) return -1;
  auto upper = upper_of(target.place.path);
  if (source.passes()) return linkat(from_folder, from, AT_FDCWD, upper.c_str(), flags);  // also one without a name
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

int w_mknodat(int folder, const char* path, mode_t mode, dev_t device) {
  return make_at(
      folder, path, [=](const char* where) { return mknod(where, mode, device); },
      [=] { return mknodat(folder, path, mode, device); });
}

int w_mknod(const char* path, mode_t mode, dev_t device) { return w_mknodat(AT_FDCWD, path, mode, device); }
int w_xmknod(int, const char* path, mode_t mode, dev_t* device) { return w_mknod(path, mode, *device); }
int w_xmknodat(int, int folder, const char* path, mode_t mode, dev_t* device) {
  return w_mknodat(folder, path, mode, *device);
}

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

// The same for a file that is open. What is open for writing is in the overlay already; what is open for reading may be
// the user's.
template <typename Act, typename Pass>
int change_open(int descriptor, Act act, Pass pass) {
  auto* own = settings.load(std::memory_order_acquire);
  auto path = own == nullptr ? "" : at_descriptor(descriptor);
  if (path.empty() || below(path, own->files) || !exists(path)) return pass();
  return change_at(AT_FDCWD, path.c_str(), false, [=](int, const char* where) { return act(where); });
}

int w_fchmod(int file, mode_t mode) {
  return change_open(file, [=](const char* where) { return chmod(where, mode); }, [=] { return fchmod(file, mode); });
}

int w_fchown(int file, uid_t user, gid_t group) {
  return change_open(
      file, [=](const char* where) { return lchown(where, user, group); }, [=] { return fchown(file, user, group); });
}

int w_futimens(int file, const timespec times[2]) {
  return change_open(
      file, [=](const char* where) { return utimensat(AT_FDCWD, where, times, AT_SYMLINK_NOFOLLOW); },
      [=] { return futimens(file, times); });
}

int w_futimes(int file, const timeval times[2]) {
  return change_open(
      file, [=](const char* where) { return utimes(where, times); }, [=] { return futimes(file, times); });
}

int w_fsetxattr(int file, const char* name, const void* value, size_t size, int flags) {
  return change_open(
      file, [=](const char* where) { return setxattr(where, name, value, size, flags); },
      [=] { return fsetxattr(file, name, value, size, flags); });
}

int w_fremovexattr(int file, const char* name) {
  return change_open(
      file, [=](const char* where) { return removexattr(where, name); }, [=] { return fremovexattr(file, name); });
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
  if ((flags & AT_EMPTY_PATH) && path && !path[0]) return w_fchown(folder, user, group);
  return change_at(folder, path, !(flags & AT_SYMLINK_NOFOLLOW),
                   [=](int at, const char* where) { return fchownat(at, where, user, group, flags); });
}

int w_chown(const char* path, uid_t user, gid_t group) { return w_fchownat(AT_FDCWD, path, user, group, 0); }
int w_lchown(const char* path, uid_t user, gid_t group) {
  return w_fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}

int w_utimensat(int folder, const char* path, const timespec times[2], int flags) {
  if (path == nullptr) return w_futimens(folder, times);
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

int w_lremovexattr(const char* path, const char* name) {
  return change_at(AT_FDCWD, path, false, [=](int, const char* where) { return lremovexattr(where, name); });
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
      {"mkstemp", address(w_mkstemp)},
      {"mkstemp64", address(w_mkstemp)},
      {"mkostemp", address(w_mkostemp)},
      {"mkostemp64", address(w_mkostemp)},
      {"mkstemps", address(w_mkstemps)},
      {"mkstemps64", address(w_mkstemps)},
      {"mkostemps", address(w_mkostemps)},
      {"mkostemps64", address(w_mkostemps)},
      {"mkdtemp", address(w_mkdtemp)},
      {"fexecve", address(w_fexecve)},
      {"execv", address(w_execv)},
      {"execvp", address(w_execvp)},
      {"execvpe", address(w_execvpe)},
      {"execl", address(w_execl)},
      {"execlp", address(w_execlp)},
      {"execle", address(w_execle)},
      {"posix_spawn", address(w_posix_spawn)},
      {"posix_spawnp", address(w_posix_spawnp)},
      {"system", address(w_system)},
      {"popen", address(w_popen)},
      {"bind", address(w_bind)},
      {"connect", address(w_connect)},
      {"sendfile", address(w_sendfile)},
      {"sendfile64", address(w_sendfile)},
      {"copy_file_range", address(w_copy_file_range)},
      {"mknod", address(w_mknod)},
      {"mknodat", address(w_mknodat)},
      {"__xmknod", address(w_xmknod)},
      {"__xmknodat", address(w_xmknodat)},
      {"fchmod", address(w_fchmod)},
      {"fchown", address(w_fchown)},
      {"futimens", address(w_futimens)},
      {"futimes", address(w_futimes)},
      {"fsetxattr", address(w_fsetxattr)},
      {"fremovexattr", address(w_fremovexattr)},
      {"lremovexattr", address(w_lremovexattr)},
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
