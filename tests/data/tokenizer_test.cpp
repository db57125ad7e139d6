// Tokenizers by files written here; tests/python/tokenizers_test.py compares each kind with the package tokenizers.
#include "trireme/data/tokenizer.h"

#include <nlohmann/json.hpp>

#include "tests/data/data_test.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/data/dataset.h"

namespace trireme {
namespace {

// a b c are 0 1 2, "ab" is 3, "abc" 4, a byte-level space 5, "Ġa" 6; 7 ends documents.
Json small_tokenizer() {
  return Json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
    "added_tokens": [{"id": 7, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
                      "normalized": false, "special": true}],
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
              "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4, "Ġ": 5, "Ġa": 6},
              "merges": [["a", "b"], ["ab", "c"], ["Ġ", "a"]]}})");
}

using Tokens = std::vector<int64_t>;

class TokenizerFile : public ::testing::Test {
 protected:
  std::shared_ptr<const Tokenizer> load(const Json& json, const std::string& eos = "<end>") {
    return load_tokenizer(folder_.write("tokenizer.json", json.dump()), {.eos_token = eos});
  }

  // Changes the value at `pointer`, and expects the refusal to have `parts`.
  void expect_refused(const char* pointer, const char* value, std::vector<std::string> parts) {
    Json json = small_tokenizer();
    json[Json::json_pointer(pointer)] = Json::parse(value);
    parts.push_back(folder_ / "tokenizer.json: ");
    expect_error<DataError>([&] { load(json); }, parts);
  }

  TemporaryFolder folder_;
};

// " ab": the rule of a and b comes before that of the space and a.
TEST_F(TokenizerFile, MergesLettersByTheEarliestRule) {
  const auto tokenizer = load(small_tokenizer());
  EXPECT_EQ(tokenizer->vocab_size(), 8);
  EXPECT_EQ(tokenizer->encode("abcab"), (Tokens{4, 3}));
  EXPECT_EQ(tokenizer->encode("ab ab ac"), (Tokens{3, 5, 3, 6, 2}));
  EXPECT_EQ(tokenizer->encode("a<end>b"), (Tokens{0, 7, 1}));
  EXPECT_EQ(tokenizer->decode({3, 5, 3, 7, 6, 99}), "ab ab a");
  EXPECT_EQ(tokenizer->decode({3, 7}, SpecialTokens::kWritten), "ab<end>");
}

TEST_F(TokenizerFile, WholeWordsComeBeforeMergesWhereTheFileSaysSo) {
  Json json = small_tokenizer();
  json["model"]["vocab"]["bc"] = 7;
  json["added_tokens"][0]["id"] = 8;
  EXPECT_EQ(load(json)->encode("bc"), (Tokens{1, 2}));
  json["model"]["ignore_merges"] = true;
  EXPECT_EQ(load(json)->encode("bc"), (Tokens{7}));
}

// GPT-2's own file says no type, and has its merges as texts.
TEST_F(TokenizerFile, OfAnOlderFormNamesNoTypeOfItsModel) {
  Json json = small_tokenizer();
  json["model"].erase("type");
  json["model"]["unk_token"] = "";
  json["model"]["merges"] = {"a b", "ab c", "Ġ a"};
  EXPECT_EQ(load(json)->encode("abcab"), (Tokens{4, 3}));
  json["model"].erase("merges");  // as of a WordLevel
  expect_error<DataError>([&] { load(json); }, {"model.type is not there"});
}

// The package would take another number, so tokens would be others than those that a model was trained with.
TEST_F(TokenizerFile, AnAddedTokenHasTheNumberThatThePackageGivesIt) {
  expect_refused("/added_tokens/0/id", "5", {"added_tokens[0].id is 5; the package tokenizers takes 7"});
  expect_refused("/added_tokens/0/id", "9", {"added_tokens[0].id is 9; the package tokenizers takes 7"});
  expect_refused("/added_tokens/0/content", R"("ab")", {"added_tokens[0].id is 7; the vocabulary has 3"});
  Json json = small_tokenizer();
  json["added_tokens"].push_back({{"id", 7}, {"content", "<more>"}});
  expect_error<DataError>([&] { load(json); }, {"added_tokens[1].id is 7; the package tokenizers takes 8"});
  json["added_tokens"][1]["id"] = 8;
  json["added_tokens"].push_back({{"id", 8}, {"content", "<more>"}});  // twice, as the first time
  json["added_tokens"].push_back({{"id", 9}, {"content", ""}});        // none, as in the package
  EXPECT_EQ(load(json)->encode("<more>a"), (Tokens{8, 0}));
  EXPECT_EQ(load(json)->vocab_size(), 9);
}

TEST_F(TokenizerFile, DocumentsEndByTheirTokenAndPromptsFollowOne) {
  const auto tokenizer = load(small_tokenizer());
  EXPECT_EQ(tokenizer->encode_document("ab"), (Tokens{3, 7}));
  EXPECT_EQ(tokenizer->encode_document("ab<end>"), (Tokens{3, 7}));
  EXPECT_EQ(tokenizer->encode_prompt("ab"), (Tokens{7, 3}));
  Json json = small_tokenizer();
  json["post_processor"] = Json::parse(R"({"type": "TemplateProcessing", "pair": [],
      "single": [{"SpecialToken": {"id": "c", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
      "special_tokens": {"c": {"id": "c", "ids": [2], "tokens": ["c"]}}})");
  EXPECT_EQ(load(json)->encode_document("ab"), (Tokens{2, 3, 7}));
  EXPECT_EQ(load(json)->encode_prompt("ab"), (Tokens{2, 3}));
  EXPECT_EQ(load(json)->encode("ab", TemplateTokens::kLeftOut), (Tokens{3}));
}

TEST_F(TokenizerFile, TheFileBesideItNamesTheTokenThatEndsDocuments) {
  folder_.write("tokenizer.json", small_tokenizer().dump());
  EXPECT_EQ(load_tokenizer(folder_.path())->document_end(), std::nullopt);
  for (const char* token : {R"("<end>")", R"({"content": "<end>", "lstrip": false})"}) {
    folder_.write("tokenizer_config.json", std::string(R"({"eos_token": )") + token + "}");
    EXPECT_EQ(load_tokenizer(folder_.path())->document_end(), 7);
  }
  EXPECT_EQ(load_tokenizer(folder_.path(), {.eos_token = "abc"})->document_end(), 4);
  expect_error<DataError>([&] { load_tokenizer(folder_.path(), {.eos_token = "</s>"}); },
                          {"it has no token `</s>`", "--eos-token"});
}

TEST_F(TokenizerFile, WhatIsNotKnownIsRefusedByItsPlace) {
  expect_refused("/model/type", R"("Unigram")", {"model.type is `Unigram`", "known are BPE", "as a .npy"});
  expect_refused("/model/dropout", "0.1", {"model.dropout is 0.1", "set it to null"});
  expect_refused("/model/end_of_word_suffix", R"("</w>")", {"model.end_of_word_suffix is \"</w>\""});
  expect_refused("/model/surprise", "1", {"model.surprise is 1; this key is not known"});
  expect_refused("/model/merges/1", R"(["b", "a"])", {"model.merges[1]: the vocabulary lacks `ba`"});
  expect_refused("/model/merges/1", R"("a b c")", {"model.merges[1] is \"a b c\"; expected two texts"});
  expect_refused("/model/vocab/a", "-1", {"model.vocab[a] is -1"});
  expect_refused("/normalizer", R"({"type": "Lowercase"})", {"normalizer.type is `Lowercase`", "known are NFC"});
  expect_refused("/pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}]})",
                 {"pre_tokenizer.pretokenizers[0].type is `Punctuation`"});
  expect_refused("/post_processor", R"({"type": "BertProcessing"})", {"post_processor.type is `BertProcessing`"});
  expect_refused("/decoder", R"({"type": "WordPiece"})", {"decoder.type is `WordPiece`"});
  expect_refused("/added_tokens/0/single_word", "true", {"added_tokens[0].single_word is true"});
  expect_refused("/surprise", "{}", {"surprise is {}"});
  const std::string processor = R"({"type": "TemplateProcessing", "special_tokens": {}, "single": [{"Sequence": )";
  expect_refused("/post_processor", (processor + R"("A"}]})").c_str(), {"single[0].Sequence is \"A\"; expected an"});
  expect_refused("/post_processor", (processor + R"({"id": 5}}]})").c_str(), {"single[0].Sequence.id is 5; expected"});
  expect_refused("/model/vocab/a", "33554432", {"model.vocab: `a` has the number 33554432; expected one below"});
  expect_error<DataError>([&] { load(Json::array()); }, {"tokenizer.json: this is []; expected an object"});
  expect_error<DataError>([&] { load_tokenizer(folder_.write("tokenizer.json", "{")); }, {"this is no JSON"});
}

TEST_F(TokenizerFile, AnExpressionThatCouldMeanSomethingElseIsRefused) {
  for (const char* expression :
       {R"(\\w+)", R"(^a)", R"(a$)", R"([a[b]])", R"([a&&b])", R"(a{1,3}+)", R"((?m:a))", R"(\\h)"}) {
    const std::string split =
        std::string(R"({"type": "Split", "behavior": "Isolated", "invert": false, "pattern": {"Regex": ")") +
        expression + R"("}})";
    expect_refused("/pre_tokenizer", split.c_str(), {"pre_tokenizer.pattern.Regex", "not sure"});
  }
  expect_refused("/pre_tokenizer", R"({"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "(a"}})",
                 {"is not understood: missing closing parenthesis"});
}

TEST_F(TokenizerFile, LettersWithoutATokenAndBytesThatAreNoTextAreErrors) {
  const auto tokenizer = load(small_tokenizer());
  expect_error<DataError>([&] { tokenizer->encode("abd"); }, {"no token for `d`"});
  expect_error<DataError>([&] { tokenizer->encode("a\xff"); }, {"not UTF-8"});
}

// Three, one and one token, and three ends; the last token is a target only.
TEST_F(TokenizerFile, MakesADataSetOfTexts) {
  const auto tokenizer = load(small_tokenizer());
  folder_.write("data/a.jsonl", "{\"text\": \"ab ab\"}\n{\"text\": \"c\"}\n");
  folder_.write("data/b.txt", "abc");
  folder_.write("data/c.txt", "\xe9t\xe9");
  const auto data =
      open_data({.path = folder_ / "data", .seq = 1, .held_out_fraction = 0, .vocab_size = 8, .tokenizer = tokenizer});
  Tokens tokens;
  for (int64_t i = 0; i < data.train.size(); ++i) tokens.push_back(data.train.sample(i).input.item<int64_t>());
  EXPECT_EQ(tokens, (Tokens{3, 5, 3, 7, 2, 7, 4}));
  EXPECT_EQ(data.train.tokens(), 8);
  EXPECT_EQ(data.vocab_size, 8);
  EXPECT_TRUE(data.is_encoded);
  EXPECT_EQ(data.skipped_kinds, std::vector<std::string>{"text that is not UTF-8"});
}

TEST_F(TokenizerFile, RefusesDataThatItCannotRead) {
  const auto open = [&](const std::string& path, const std::shared_ptr<const Tokenizer>& tokenizer) {
    open_data({.path = path, .seq = 1, .held_out_fraction = 0, .tokenizer = tokenizer});
  };
  const auto tokenizer = load(small_tokenizer());
  const auto latin = folder_.write("latin.txt", "ab\nab\xe9\n");
  expect_error<DataError>([&] { open(latin, tokenizer); }, {latin, "line 2", "not UTF-8", "iconv"});
  const auto tokens = folder_.write("a.bin", raw_tokens<uint16_t>({1, 2, 3}));
  expect_error<DataError>([&] { open(tokens, tokenizer); }, {"holds tokens", "--tokenizer"});
  const auto text = folder_.write("d.txt", "abd");
  expect_error<DataError>([&] { open(text, tokenizer); }, {text, "no token for `d`"});
  expect_error<ConfigError>([&] { open(text, load(small_tokenizer(), "")); }, {"--eos-token TEXT"});
}

}  // namespace
}  // namespace trireme
