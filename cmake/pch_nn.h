// pch_core.h plus what every module of torch::nn needs, for models, programs and tests. Not <torch/nn.h>: each file
// that loads it would instantiate all of torch::nn's modules anew (docs/decisions/003-precompiled-headers.md).
#pragma once
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include "pch_core.h"
