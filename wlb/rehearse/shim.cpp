// A device guard and hooks for "cuda" that do nothing, so that autograd accepts fake CUDA tensors
// without a GPU. A CPU build of torch has no guard and no hooks for CUDA, and in a CUDA build they
// would fail without a GPU. shim.py builds and loads this file.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kFirst(DeviceType::CUDA, 0);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return kFirst; }
  Device getDevice() const override { return kFirst; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kFirst); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};
}  // namespace

// Called after torch is imported, because a CUDA build registers its own guard during the import.
extern "C" void wlb_register_guard() {
  c10::impl::registerDeviceGuard(DeviceType::CUDA, new Guard());
}

// Registered before torch is imported, because torch looks up its hooks only once. The priority
// makes torch prefer these hooks to those of a CUDA build.
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(
    CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}  // namespace at
