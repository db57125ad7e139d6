"""Tokenizers of each kind give the tokens, and the texts, that the package tokenizers gives for the same file."""
import json
import pathlib
import random
import subprocess

from harness import PROGRAM, Case, main
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENCODE_TEXTS = PROGRAM.parents[1] / "tests/python/encode_texts"
END, BEGIN = "<|endoftext|>", "<|begin|>"

LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# Letters of many kinds, spaces of Unicode and what only looks like one, letters that fold or normalize to others.
POOLS = [
    "abcdefghijklmnopqrstuvwxyz", "ABCXYZ", "0123456789", " ", " \t\n\r", "'\"().,:;!?-_/\\<>|{}[]#*", "\u00e9\u00fc\u00df\u00f1\u00c5\u00f8",
    "\u03b1\u03b2\u03b3\u03a9\u03c2", "\u0416\u0438\u0439\u0451", "\u05d0\u05b8\u05d1", "\u0627\u0644\u0661\u0662", "\u0915\u094d\u0937\u093f\u0967",
    "\u0e01\u0e33\u0e49", "\u1100\u1161\u11a8\uac00\ud55c", "\u4e2d\u6587\u5b57\u3042\u30ab\uff21\uff11", "\U0001f600\U0001f468\u200d\U0001f469\U0001f3fd\ufe0f",
    "e\u0301a\u0308\u0323o\u0302\u0301", "\u0085\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000", "\u180e\u200b\u200c\u200d\ufeff\x00\x1f\x7f",
    "\u017f\u212a\u212b\u2126\ufb01\u01c5\u2160\u00bd\u00b2", "'s'S'\u017f'LL're", "\U00010348\U0001d400\U00020000", "\u2581\u0120\u010a"
]


def texts():
    """Some thousand texts: lines and stretches of this project's pages, and letters drawn at random."""
    draw = random.Random(5)
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("[a-d]*.md")))
    lines = pages.splitlines()
    found = ["", " ", "  ", "\n", "\n\n \n", "a", END, f" {END} ", f"one{END}two", f"{BEGIN}{END}{END}x", "<0x41> </s> <s> <unk>"]
    found += [draw.choice(lines) for _ in range(600)]
    found += [pages[begin:begin + 700] for begin in (draw.randrange(len(pages)) for _ in range(60))]
    inserted = [END, BEGIN, " <keep> ", "<left>", "<right>", "caf\u00e9", "cafe\u0301", "<end", "\u2581\u2581"]
    for _ in range(2500):
        letters = ["".join(draw.choices(draw.choice(POOLS), k=draw.randrange(1, 7))) for _ in range(draw.randrange(1, 12))]
        if draw.random() < 0.3:
            letters.insert(draw.randrange(len(letters) + 1), draw.choice(inserted))
        found.append("".join(letters))
    return found


def trained(pre_tokenizer, normalizer=None, alphabet=(), size=1400):
    """A tokenizer that has learned this project's pages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END, BEGIN], initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator(((ROOT / name).read_text() for name in ("README.md", "docs/data.md", "docs/cli.md", "docs/words.md")), trainer)
    return tokenizer


def byte_level(pre_tokenizer, normalizer=None):
    tokenizer = trained(pre_tokenizer, normalizer, sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<keep>"), AddedToken("caf\u00e9", normalized=True)])
    tokenizer.add_special_tokens([AddedToken("<left>", lstrip=True), AddedToken("<right>", rstrip=True)])
    return tokenizer


def split(*patterns):
    """A pre-tokenizer that cuts by expressions, and then makes letters of bytes."""
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior) for pattern, behavior in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def with_bytes(tokenizer, unknown="<unk>"):
    """The same in the form of Llama 2: tokens of bytes stand for what the vocabulary lacks."""
    file = json.loads(tokenizer.to_str())
    first = [unknown, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = first + [token for token in file["model"]["vocab"] if token not in first]
    ids = {token: i for i, token in enumerate(vocabulary)}
    file["model"].update(vocab=ids, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    file["added_tokens"] = [{**token, "id": ids[token["content"]]} for token in file["added_tokens"]]
    return Tokenizer.from_str(json.dumps(file))


class Tokenizers(Case):
    """Each test is one kind."""

    def compare(self, tokenizer, change=None):
        file = json.loads(tokenizer.to_str())
        if change:
            change(file)
        path = self.folder / "tokenizer.json"
        path.write_text(json.dumps(file))
        tokenizer = Tokenizer.from_file(str(path))
        wanted = texts()
        done = subprocess.run([ENCODE_TEXTS, path], input=json.dumps(wanted), text=True, capture_output=True, timeout=240)
        self.assertEqual(done.returncode, 0, done.stderr)
        found = json.loads(done.stdout)
        self.assertEqual(found["vocab_size"], tokenizer.get_vocab_size())
        self.assertGreater(len(wanted), 3000)
        for text, result in zip(wanted, found["results"], strict=True):
            ids = tokenizer.encode(text).ids
            self.assertEqual(result["tokens"], ids, repr(text))
            self.assertEqual(result["plain"], tokenizer.encode(text, add_special_tokens=False).ids, repr(text))
            for key, skip in (("text", True), ("whole", False)):
                self.assertEqual(bytes.fromhex(result[key]).decode("utf-8", errors="replace"),
                                 tokenizer.decode(ids, skip_special_tokens=skip), (repr(text), key))

    def test_gpt_2(self):
        self.compare(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)))

    def test_gpt_2_with_a_space_before(self):
        self.compare(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)))

    def test_llama_3(self):
        tokenizer = byte_level(split((LLAMA_3, "isolated")))
        tokenizer.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))])
        ])
        self.compare(tokenizer, lambda file: file["model"].update(ignore_merges=True))

    def test_qwen(self):
        self.compare(byte_level(split((QWEN, "isolated")), normalizers.NFC()))

    def test_an_older_form(self):
        """GPT-2's own file names no type of its model, and has merges as texts."""
        def as_texts(file):
            del file["model"]["type"]
            file["model"]["merges"] = [" ".join(pair) for pair in file["model"]["merges"]]

        self.compare(byte_level(split((O200K, "isolated"))), as_texts)

    def test_every_behavior_of_a_split(self):
        self.compare(byte_level(split((r"\p{N}{1,3}", "isolated"), ("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", "isolated"), (r"[aeiou]", "merged_with_previous"),
                                      (r"\s+", "merged_with_next"), (r"\p{P}", "contiguous"), (r"\p{Cc}", "removed"), (r"(?=[A-Z])", "isolated"))))

    def test_digits_and_other_forms(self):
        for form in (normalizers.NFKC(), normalizers.NFD(), normalizers.NFKD()):
            with self.subTest(form=form):
                self.compare(byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), form))

    def test_llama_2(self):
        tokenizer = with_bytes(trained(pre_tokenizers.Metaspace()))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN)), (END, tokenizer.token_to_id(END))])
        self.compare(tokenizer, lambda file: file.update(pre_tokenizer=None))

    def test_metaspace(self):
        for scheme in ("always", "first", "never"):
            for cuts in (True, False):
                with self.subTest(scheme=scheme, cuts=cuts):
                    tokenizer = with_bytes(trained(pre_tokenizers.Metaspace(prepend_scheme=scheme)))
                    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=cuts)
                    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
                    self.compare(tokenizer)

    def test_unknown_letters(self):
        for fuses in (True, False):
            with self.subTest(fuses=fuses):
                tokenizer = with_bytes(trained(pre_tokenizers.Metaspace()))
                self.compare(tokenizer, lambda file: file["model"].update(byte_fallback=False, fuse_unk=fuses))


if __name__ == "__main__":
    main()
