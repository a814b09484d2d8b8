// A device of CUDA for fake tensors, in a torch that has none. Autograd's engine asks a device for
// its stream, and the build whether it has an accelerator; nothing is computed and nothing waits.
#include <ATen/detail/CUDAHooksInterface.h>
// Torch 2.9 lets nothing derive from NoOpDeviceGuardImpl.
#define final
#include <c10/core/impl/DeviceGuardImplInterface.h>
#undef final

#include <utility>

namespace {

constexpr auto kind = c10::DeviceType::CUDA;
const c10::Device device(kind, 0);
const c10::Stream stream(c10::Stream::DEFAULT, device);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kind> {
  c10::Device exchangeDevice(c10::Device) const override { return device; }
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  long versionCuDNN() const override { return 91300; }
  long versionRuntimeCuDNN() const override { return 91300; }
};

Guard guard;
Hooks hooks;

}  // namespace

// Gives torch these hooks for its own, and a second time its own again. torch makes its hooks once
// and keeps a reference, so the tables of their functions change places.
extern "C" void exchange() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kind)].store(&guard);
  auto& held = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::swap(*reinterpret_cast<void**>(&hooks), *reinterpret_cast<void**>(&held));
}
