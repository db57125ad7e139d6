#include "trireme/device/kernel.h"

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "trireme/base/error.h"
#include "trireme/device/nvidia_library.h"
#include "trireme/device/stream.h"

namespace trireme {

namespace {

// Types of nvrtc.h and cuda.h that never changed: results are ints, 0 is success, and objects are pointers.
using Handle = void*;

template <class Function>
void fill_from(Handle library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr) throw Error(ErrorCode::kUnsupported, str("NVIDIA's library has no ", name));
}

struct Nvrtc {
  int (*create)(Handle*, const char* text, const char* name, int headers, const char* const* texts,
                const char* const* names);
  int (*destroy)(Handle*);
  int (*compile)(Handle, int options, const char* const*);
  int (*log_bytes)(Handle, size_t*);
  int (*log)(Handle, char*);
  int (*code_bytes)(Handle, size_t*);
  int (*code)(Handle, char*);
  const char* (*error)(int);
};

/// libtorch's own one, of its CUDA's version, hangs on a library of its that needs the driver. Without a driver: any.
Handle open_nvrtc() {
  if (Handle torch = ::dlopen("libcaffe2_nvrtc.so", RTLD_NOW | RTLD_LOCAL)) return torch;
  std::string problem = ::dlerror();
  for (const auto& [name, wheel] : {std::pair("libnvrtc.so.13", "cu13"), std::pair("libnvrtc.so.12", "cuda_nvrtc")}) {
    std::string why;
    if (Handle library = open_nvidia_library(name, wheel, why)) return library;
    problem += "; " + why;
  }
  throw Error(ErrorCode::kUnsupported, str("NVRTC cannot be loaded: ", problem));
}

/// NVRTC opens this library by its name alone when it compiles. Without a CUDA toolkit it lies in NVIDIA's wheel, where
/// the loader does not look; it takes one that is loaded already. Where it is nowhere, the compilation says so.
void load_builtins(Handle nvrtc) {
  int (*version)(int*, int*) = nullptr;
  fill_from(nvrtc, "nvrtcVersion", version);
  int major = 0, minor = 0;
  if (version(&major, &minor) != 0) return;
  std::string problem;
  (void)open_nvidia_library(str("libnvrtc-builtins.so.", major, ".", minor),
                            major >= 13 ? str("cu", major) : "cuda_nvrtc", problem);
}

Nvrtc load_nvrtc() {
  const Handle library = open_nvrtc();
  Nvrtc api{};
  fill_from(library, "nvrtcCreateProgram", api.create);
  fill_from(library, "nvrtcDestroyProgram", api.destroy);
  fill_from(library, "nvrtcCompileProgram", api.compile);
  fill_from(library, "nvrtcGetProgramLogSize", api.log_bytes);
  fill_from(library, "nvrtcGetProgramLog", api.log);
  fill_from(library, "nvrtcGetCUBINSize", api.code_bytes);
  fill_from(library, "nvrtcGetCUBIN", api.code);
  fill_from(library, "nvrtcGetErrorString", api.error);
  load_builtins(library);
  return api;
}

/// The program of one compilation.
class Compilation {
 public:
  Compilation(const Nvrtc& api, const KernelText& kernel) : api_(api) {
    std::vector<const char*> names, texts;
    for (const auto& [name, text] : kernel.headers) {
      names.push_back(name.c_str());
      texts.push_back(text.c_str());
    }
    check(api_.create(&program_, kernel.text.c_str(), kernel.function.c_str(), static_cast<int>(names.size()),
                      texts.data(), names.data()),
          kernel.function);
  }
  ~Compilation() { (void)api_.destroy(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  std::string run(const std::string& what, const std::vector<const char*>& options) {
    const int result = api_.compile(program_, static_cast<int>(options.size()), options.data());
    if (result != 0)
      throw Error(ErrorCode::kUnsupported, str("NVRTC does not compile ", what, " (", api_.error(result),
                                               "): ", read(api_.log_bytes, api_.log)));
    return read(api_.code_bytes, api_.code);
  }

 private:
  std::string read(int (*bytes)(Handle, size_t*), int (*copy)(Handle, char*)) const {
    size_t count = 0;
    check(bytes(program_, &count), "its result");
    std::string text(count, '\0');
    check(copy(program_, text.data()), "its result");
    return text;
  }
  void check(int result, const std::string& what) const {
    if (result != 0) throw Error(ErrorCode::kUnsupported, str("NVRTC failed on ", what, ": ", api_.error(result)));
  }

  const Nvrtc& api_;
  Handle program_ = nullptr;
};

struct Driver {
  int (*device)(int*, int number);
  int (*attribute)(int*, int attribute, int device);
  int (*primary_context)(Handle*, int device);
  int (*set_context)(Handle);
  int (*load_module)(Handle*, const void* code);
  int (*function)(Handle*, Handle module, const char* name);
  int (*launch)(Handle function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes,
                Handle stream, void** arguments, void** extra);
  int (*error_text)(int, const char**);

  std::string words(int result) const {
    const char* text = nullptr;
    (void)error_text(result, &text);
    return str("the NVIDIA driver says: ", text != nullptr ? text : "nothing", " (error ", result, ")");
  }
  void check(int result, const char* what) const {
    if (result != 0) throw Error(ErrorCode::kUnsupported, str(what, " failed; ", words(result)));
  }
};

Driver load_driver() {
  Handle library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw Error(ErrorCode::kUnsupported, str("no NVIDIA driver was found (", ::dlerror(), ")"));
  Driver api{};
  fill_from(library, "cuDeviceGet", api.device);
  fill_from(library, "cuDeviceGetAttribute", api.attribute);
  fill_from(library, "cuDevicePrimaryCtxRetain", api.primary_context);
  fill_from(library, "cuCtxSetCurrent", api.set_context);
  fill_from(library, "cuModuleLoadData", api.load_module);
  fill_from(library, "cuModuleGetFunction", api.function);
  fill_from(library, "cuLaunchKernel", api.launch);
  fill_from(library, "cuGetErrorString", api.error_text);
  return api;
}

const Driver& driver() {
  static const Driver api = load_driver();
  return api;
}

// CUdevice_attribute: the two halves of the compute capability.
constexpr int kMajor = 75, kMinor = 76;

}  // namespace

std::string compile_kernel(const KernelText& kernel, const std::string& architecture) {
  static const Nvrtc api = load_nvrtc();
  const std::string target = "--gpu-architecture=" + architecture;
  Compilation compilation(api, kernel);
  return compilation.run(str(kernel.function, " for ", architecture),
                         {target.c_str(), "--std=c++17", "--device-as-default-execution-space", "--fmad=false"});
}

class DeviceKernel::Impl {
 public:
  explicit Impl(KernelText text) : text_(std::move(text)) {}

  const std::string& prepare(c10::Device device) { return loaded(device).problem; }

  void launch(c10::Device device, int blocks, int threads, const void* argument) {
    const Loaded& here = loaded(device);
    if (!here.problem.empty()) throw Error(ErrorCode::kUnsupported, here.problem);
    // A thread that libtorch's runtime has not been used in has no context yet.
    const c10::DeviceGuard guard(device);
    driver().check(driver().set_context(here.context), "cuCtxSetCurrent");
    void* arguments[] = {const_cast<void*>(argument)};
    const int result =
        driver().launch(here.function, static_cast<unsigned>(blocks), 1, 1, static_cast<unsigned>(threads), 1, 1, 0,
                        reinterpret_cast<Handle>(current_stream(device).native_handle()), arguments, nullptr);
    if (result != 0)
      throw Error(ErrorCode::kInternal, str(text_.function, ", or something enqueued before it, failed on ",
                                            device.str(), ": ", driver().words(result)));
  }

 private:
  struct Loaded {
    Handle context = nullptr;  // libtorch's; retained for good, as libtorch does
    Handle function = nullptr;
    std::string problem;
  };

  /// Or why it is not. A map's entries stay where they are.
  const Loaded& loaded(c10::Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = loaded_.find(device.index());
    if (found != loaded_.end()) return found->second;
    Loaded result;
    try {
      result = load(device);
    } catch (const std::exception& error) {
      result.problem = error.what();
    }
    return loaded_.emplace(device.index(), std::move(result)).first->second;
  }

  Loaded load(c10::Device device) {
    Loaded result;
    const c10::DeviceGuard guard(device);
    const Driver& api = driver();
    int number = 0, major = 0, minor = 0;
    api.check(api.device(&number, device.index()), "cuDeviceGet");
    api.check(api.attribute(&major, kMajor, number), "cuDeviceGetAttribute");
    api.check(api.attribute(&minor, kMinor, number), "cuDeviceGetAttribute");
    std::string& code = code_[str("sm_", major, minor)];
    if (code.empty()) code = compile_kernel(text_, str("sm_", major, minor));
    api.check(api.primary_context(&result.context, number), "cuDevicePrimaryCtxRetain");
    api.check(api.set_context(result.context), "cuCtxSetCurrent");
    Handle module = nullptr;
    api.check(api.load_module(&module, code.data()), "cuModuleLoadData");
    api.check(api.function(&result.function, module, text_.function.c_str()), "cuModuleGetFunction");
    return result;
  }

  const KernelText text_;
  std::mutex mutex_;
  std::map<int, Loaded> loaded_;             // by device; guarded by mutex_
  std::map<std::string, std::string> code_;  // by architecture; guarded by mutex_
};

DeviceKernel::DeviceKernel(KernelText text) : impl_(std::make_unique<Impl>(std::move(text))) {}
DeviceKernel::~DeviceKernel() = default;
const std::string& DeviceKernel::prepare(c10::Device device) { return impl_->prepare(device); }
void DeviceKernel::launch(c10::Device device, int blocks, int threads, const void* argument) {
  impl_->launch(device, blocks, threads, argument);
}

}  // namespace trireme
