"""ZeRO-Offload for plain PyTorch: the optimizer lives on the host, the 16-bit parameters on the device."""
