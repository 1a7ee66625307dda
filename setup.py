"""The one part that is compiled: kernels for CPUs.  All else is in setup.cfg."""

from setuptools import Extension, setup

SOURCE = "epdd/worker/kernels/source/"

setup(ext_modules=[Extension(
    "epdd.worker.kernels._library",
    sources=[SOURCE + name for name in ("library.cpp", "fp8.cpp", "experts.cpp", "isa/avx2.cpp", "isa/avx512.cpp",
                                        "isa/amx.cpp")],
    depends=[SOURCE + name for name in ("library.h", "vectors.h", "products.h", "tiles.h", "operands.h", "attention.h",
                                        "experts.h", "kernels.h", "many_rows/split.h", "many_rows/gemm.h",
                                        "many_rows/flash.h")],
    include_dirs=[SOURCE],
    # Compiled for OpenMP and not linked with it: the calls find the runtime that torch has loaded.
    extra_compile_args=["-std=c++17", "-O3", "-fopenmp", "-Wno-psabi", "-Wno-maybe-uninitialized"],
    libraries=["m"],
    language="c++",
    optional=True,      # without a compiler, or on another kind of CPU, everything works by torch alone
)])
