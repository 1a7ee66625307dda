"""The one part that is compiled: kernels for CPUs.  All else is in setup.cfg."""

from setuptools import Extension, setup

NATIVE = "epdd/worker/native/"

setup(ext_modules=[Extension(
    "epdd.worker.kernels.native._library",
    sources=[NATIVE + name for name in ("library.cpp", "fp8.cpp", "avx2.cpp", "avx512.cpp", "amx.cpp")],
    depends=[NATIVE + name for name in ("library.h", "vectors.h", "products.h", "tiles.h", "attention.h", "kernels.h",
                                        "split.h", "gemm.h", "flash.h")],
    # Compiled for OpenMP and not linked with it: the calls find the runtime that torch has loaded.
    extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-Wno-psabi", "-Wno-maybe-uninitialized"],
    libraries=["m"],
    language="c++",
    optional=True,      # without a compiler, or on another kind of CPU, everything works by torch alone
)])
