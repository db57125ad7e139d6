// A step function over stages that own parts of an unmodified model, by SageMaker's names (smp). Python's are in
// trireme.smp.
#pragma once

#include "trireme/pipeline/step_engine.h"  // defines: StepEngine, StageOf
#include "trireme/pipeline/step_model.h"   // defines: smp::DistributedModel, smp::Partition, smp::StepOutput
#include "trireme/pipeline/step_runner.h"  // defines: StepRunnerOptions
