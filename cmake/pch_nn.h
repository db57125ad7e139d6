// pch_core.h plus torch::nn and torch::optim: for models, programs and tests.
#pragma once
#include <torch/nn.h>
#include <torch/optim.h>
#include "pch_core.h"
