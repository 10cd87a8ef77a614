"""Kernels measured beside their peers on the GPU here: latency, memory, host time, and how far from the roofline."""
