"""Running: what computes the live-outs of one program, on CUDA and on the CPU."""
