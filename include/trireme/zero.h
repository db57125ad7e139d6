// Functions that a program for ZeRO stage 3 calls besides an engine's methods: DeepSpeed's `zero` and `utils`, by their
// names.
#pragma once

#include "trireme/access/parameter_access.h"  // defines: safe_get_full_fp32_param and its kin
#include "trireme/config/init_policy.h"       // defines: init_policy
#include "trireme/pager/init/gathered.h"      // defines: zero::GatheredParameters, zero::register_external_parameter
#include "trireme/pager/init/init.h"          // defines: zero::Init
#include "trireme/plan/mem_needs.h"           // defines: estimate_zero2_model_states_mem_needs_all_live and its kin
