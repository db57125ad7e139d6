// All that a training program includes.
//
//   auto world = trireme::init();
//   MyNet net;
//   auto engine = trireme::initialize(world, net, {.config = "ds_config.json"});
//   for (auto& batch : loader) {
//     auto loss = engine(batch.input, batch.target);
//     engine.backward(loss);
//     engine.step();
//   }
#pragma once

#include "trireme/base/error.h"                  // defines: Error and its subclasses
#include "trireme/base/log.h"                    // defines: set_log_sink
#include "trireme/base/stop_signals.h"           // defines: stop_requested, take_save_request
#include "trireme/checkpoint/checkpoint.h"       // defines: save_checkpoint, load_checkpoint, latest_tag
#include "trireme/comm/stop_agreement.h"         // defines: the same of all ranks
#include "trireme/comm/world.h"                  // defines: World, init
#include "trireme/config/config.h"               // defines: Config, read_config
#include "trireme/data/loader.h"                 // defines: TokenDataset, DataLoader
#include "trireme/engine/engine.h"               // defines: Engine
#include "trireme/engine/model_engine.h"         // defines: ModelEngine, initialize
#include "trireme/fsdp/fully_shard.h"            // defines: FullySharded
#include "trireme/precision/grad_scaler.h"       // defines: GradScaler
#include "trireme/recompute/recompute.h"         // defines: recompute, recompute_sequential
#include "trireme/recompute/selective.h"         // defines: SelectiveRecompute
#include "trireme/recompute/tiled.h"             // defines: tiled, tiled_cross_entropy, TiledComputation
#include "trireme/sequence/sequence_parallel.h"  // defines: SequenceParallel
