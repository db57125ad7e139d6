#include "trireme/optim/fields.h"

#include <iterator>
#include <limits>
#include <string_view>
#include <type_traits>

#include "config/document/keys.h"
#include "config/options.h"
#include "config/typed_section.h"

namespace trireme {
namespace {

using OptimizerRow = Option<OptimizerOptions>;
using Types = std::vector<std::string>;

constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kAdagrad,
                                    OptimizerKind::kLamb, OptimizerKind::kLion,  OptimizerKind::kMuon,
                                    OptimizerKind::kSgd};
// DeepSpeed's own, then torch.optim's.
const Types kOptimizersNotThereYet = {"OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",    "MuAdamW", "MuSGD",
                                      "Adadelta",   "Adafactor",  "Adamax",      "ASGD",      "LBFGS",   "NAdam",
                                      "RAdam",      "RMSprop",    "Rprop",       "SparseAdam"};

// An element whose gradient was always zero divides by eps alone.
constexpr NumberRange kEps = {.min = std::numeric_limits<double>::denorm_min(),
                              .max = std::numeric_limits<double>::max(),
                              .words = "a finite number > 0, such as 1e-8"};

/// The defaults that differ from those of OptimizerOptions.
OptimizerOptions defaults_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdagrad:
      return {.kind = kind, .lr = 1e-2, .eps = 1e-10};
    case OptimizerKind::kMuon:  // those of the reference's Muon for the parameters that Adam updates
      return {.kind = kind, .beta2 = 0.95, .eps = 1e-10, .momentum = 0.95};
    default:
      return {.kind = kind};
  }
}

OptimizerRow betas() {
  OptimizerRow row{.path = "optimizer.params.betas",
                   .type = "a list of two numbers, each from 0 up to, but not including, 1",
                   .standard = "`[0.9,0.999]`, Muon `[0.9,0.95]`",
                   .doc = "decay of the moments; of Muon's Adam"};
  row.read = [path = row.path, words = row.type](Document& file, OptimizerOptions& options) {
    const Json* betas = file.find(path);
    if (!betas) return;
    const auto is_beta = [](const Json& beta) { return beta.is_number() && beta >= 0.0 && beta < 1.0; };
    if (!betas->is_array() || betas->size() != 2 || !is_beta(betas->at(0)) || !is_beta(betas->at(1)))
      file.fail(path, words);
    options.beta1 = betas->at(0);
    options.beta2 = betas->at(1);
  };
  row.write = [](const OptimizerOptions& options) { return Json::array({options.beta1, options.beta2}); };
  return row;
}

/// `read` follows, where the key is there or not.
OptimizerRow and_then(OptimizerRow row, std::function<void(Document&, OptimizerOptions&)> read) {
  row.read = [first = row.read, read = std::move(read)](Document& file, OptimizerOptions& options) {
    first(file, options);
    read(file, options);
  };
  return row;
}

/// As there: "Adam" too decouples weight decay unless told otherwise, and AdamW always does.
OptimizerRow adam_w_mode() {
  const char* path = "optimizer.params.adam_w_mode";
  const auto is_decoupled = [](const OptimizerOptions& options) { return options.kind == OptimizerKind::kAdamW; };
  return and_then(
      resolved<OptimizerOptions>(path, flag(), is_decoupled, "`true`",
                                 "`Adam` decouples weight decay too, unless this is false; `AdamW` always does"),
      [path](Document& file, OptimizerOptions& options) {
        if (file.flag_or(path, true)) options.kind = OptimizerKind::kAdamW;
      });
}

/// torch.optim.AdamW's own default of weight decay; DeepSpeed's fused ones decay nothing.
OptimizerRow torch_adam() {
  const char* path = "optimizer.params.torch_adam";
  return and_then(resolved<OptimizerOptions>(path, flag(), nullptr, "`false`",
                                             "with decoupled decay the default of `weight_decay` is 0.01, as in torch"),
                  [path](Document& file, OptimizerOptions& options) {
                    const bool is_torchs = file.flag_or(path, false) && options.kind == OptimizerKind::kAdamW;
                    options.weight_decay = is_torchs ? 0.01 : 0;
                  });
}

OptimizerRow adam_lr() {
  const char* path = "optimizer.params.adam_lr";
  OptimizerRow row = resolved<OptimizerOptions>(
      path, number(kNonNegative), [](const OptimizerOptions& o) { return o.adam_lr.value_or(o.lr); }, "`lr`",
      "of the parameters that Adam updates");
  return and_then(row, [path](Document& file, OptimizerOptions& options) {
    options.adam_lr = file.number_or(path, options.lr, kNonNegative);
  });
}

OptimizerRow muon_lr() {  // after `lr` and `adam_lr`, whose default is the former
  const char* path = "optimizer.params.muon_lr";
  return and_then(resolved<OptimizerOptions>(path, number(kNonNegative), nullptr, "`lr`", "of the matrices"),
                  [path](Document& file, OptimizerOptions& options) {
                    options.lr = file.number_or(path, options.lr, kNonNegative);
                  });
}

OptimizerRow max_grad_norm() {
  const char* path = "optimizer.params.max_grad_norm";
  return {.path = path,
          .type = "–",
          .standard = "–",
          .doc = "an error, as in DeepSpeed: set `gradient_clipping`",
          .read = [path](Document& file, OptimizerOptions&) {
            if (file.has(path))
              file.refuse(path, str("`", path,
                                    "` is not an option of an optimizer here; remove it and set "
                                    "`gradient_clipping` instead"));
          }};
}

void check_coefficients(Document& file, OptimizerOptions& options) {
  const char* path = "optimizer.params.max_coeff";
  if (options.max_coeff < options.min_coeff)
    file.refuse(path, str("`", path, "` is ", options.max_coeff, "; expected `min_coeff`, which is ", options.min_coeff,
                          ", or more"));
}

void check_nesterov(Document& file, OptimizerOptions& options) {
  if (options.nesterov && options.momentum == 0) file.fail("optimizer.params.nesterov", "false, or a momentum above 0");
}

/// The row of a hyperparameter, but for betas, which are two in one list.
template <class Member>
OptimizerRow row_of_field(const Field& field, Member OptimizerOptions::*member) {
  const std::string path = str("optimizer.params.", field.name);
  const auto type = [&] {
    if constexpr (std::is_same_v<Member, bool>)
      return flag();
    else if constexpr (std::is_same_v<Member, int64_t>)
      return integer(field.least > 0 ? kPositive : kCount);
    else
      return number(field.least > 0 ? kEps : kNonNegative);
  }();
  OptimizerRow row = works<OptimizerOptions>(
      path, type, [member](auto& options) -> auto& { return options.*member; }, field.doc);
  if (field.most >= 1) return row;
  return and_then(row, [path, member](Document& file, OptimizerOptions& options) {
    if (options.*member >= 1) file.fail(path, "a number from 0 up to, but not including, 1");
  });
}

/// None: all.
Types types_of(const Field& field) {
  Types types;
  for (const OptimizerKind kind : kKinds)
    if (field.is_of(kind) || (field.muons_adam && kind == OptimizerKind::kMuon))
      types.emplace_back(optimizer_name(kind));
  return types.size() == std::size(kKinds) ? Types{} : types;
}

std::vector<OptimizerRow> optimizer_rows() {
  const Types adam = {"Adam", "AdamW"}, muon = {"Muon"};
  std::vector<OptimizerRow> rows;
  const auto add = [&](const Types& types, OptimizerRow row) {
    row.types = types;
    rows.push_back(std::move(row));
  };
  add({}, max_grad_norm());
  fields([&](const Field& field, auto own, auto) {
    const std::string_view name = field.name;
    if (name != "betas")
      add(types_of(field), row_of_field(field, own));
    else if (field.place == 0)
      add(types_of(field), betas());
    // Keys beside the hyperparameters, whose defaults are those of the keys before them, or that decide those after
    if (name == "lr") {
      add(muon, adam_lr());
      add(muon, muon_lr());
    } else if (name == "eps") {
      add(adam, adam_w_mode());
      add(adam, torch_adam());
    } else if (name == "nesterov") {
      rows.back() = and_then(rows.back(), check_nesterov);
    } else if (name == "max_coeff") {
      rows.back() = and_then(rows.back(), check_coefficients);
    }
  });
  for (const KeyGroup& group : key_groups("optimizer"))
    for (const auto& item : group.keys.items()) add(group.types, row_of<OptimizerOptions>(group, item.key()));
  return rows;
}

}  // namespace

const std::vector<OptimizerRow>& optimizer_options() {
  static const std::vector<OptimizerRow> rows = optimizer_rows();
  return rows;
}

void read_optimizer(Document& file, Config& config, std::vector<KnownKey>& known) {
  TypeNames names{.not_there_yet = kOptimizersNotThereYet};
  for (const OptimizerKind kind : kKinds) names.supported.emplace_back(optimizer_name(kind));
  const auto type = read_type(file, "optimizer", names, known);
  if (!type) return;
  known.push_back({"optimizer.legacy_fusion"});
  file.attempt([&] {
    if (file.flag_or("optimizer.legacy_fusion", false))
      file.not_there_yet("optimizer.legacy_fusion", "remove it or set it to false");
  });
  for (const OptimizerKind kind : kKinds)
    if (*type == optimizer_name(kind)) config.optimizer = defaults_of(kind);
  const auto rows = rows_of(optimizer_options(), *type);
  add_keys(rows, known);
  read_rows(rows, file, *config.optimizer);
}

Json optimizer_json(const OptimizerOptions& options) {
  return typed_json("optimizer", optimizer_options(), optimizer_name(options.kind), options);
}

}  // namespace trireme
