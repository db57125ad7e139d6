// First weights from a file instead of from the seed.
#pragma once

#include <filesystem>

#include "trireme/models/language_model.h"

namespace trireme::cli {

/// Copies the tensors of a safetensors file (or of a Hugging Face folder or index) into the parameters of the same
/// names, converting their dtype. A tied weight may be missing under its second name. GPT-2 is read as published:
/// without `transformer.` in front, and with the causal masks (`.attn.bias`), which are skipped.
///
/// Throws    IoError, CheckpointError as read_safetensors; ConfigError naming the tensor: missing, of another shape, or of no
///           parameter's name.
void init_weights(LanguageModel& model, const std::filesystem::path& path);

}  // namespace trireme::cli
