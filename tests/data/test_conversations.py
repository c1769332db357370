"""Items to pieces: supervised turns, block restarts, refusals with file and line (faults A8, B4, B7, C2 in part)."""

import json

import pytest

from megatron.bdlm.data.conversations import ConversationEncoder
from megatron.bdlm.data.documents import DataError, Record
from megatron.bdlm.data.tokenizer_training import byte_tokenizer, save_tokenizer
from megatron.bdlm.data.tokenizers import TokenizerSource, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.role == 'assistant' and loop.last %}(t){% endif %}"
    "{{ m.content.split('</t>')[-1] }}<|im_end|>{% endfor %}"
)
END, MASK, START, STOP = 256, 257, 259, 260


def encoder_of(path, template=TEMPLATE):
    save_tokenizer(byte_tokenizer(["<|im_start|>", "<|im_end|>"]), path, template)
    return ConversationEncoder(load_tokenizer(TokenizerSource(tokenizer_model=str(path))))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_of(tmp_path_factory.mktemp("tokenizer") / "chat")


def record(item, line=7):
    return Record("a.jsonl", line, (item if isinstance(item, str) else json.dumps(item)).encode() + b"\n")


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def shown(piece):
    """(text, supervised) of the runs between restarts."""
    names = {END: "<e>", START: "<s>", STOP: "</s>"}
    ends = [*piece.restarts, len(piece)]
    runs = []
    for begin, end in zip([0, *piece.restarts], ends):
        assert len(set(piece.eligible[begin:end].tolist())) == 1
        text = "".join(names.get(token, chr(token)) for token in piece.tokens[begin:end].tolist())
        runs.append((text, bool(piece.eligible[begin])))
    return runs


def test_assistant_turns_are_supervised_and_restart_blocks(encoder):
    piece = encoder.encode(
        record(chat(("system", "be"), ("user", "hi"), ("assistant", "yo!"), ("user", "more"), ("assistant", "no")))
    )
    assert shown(piece) == [
        ("<s>system\nbe</s>\n<s>user\nhi</s>\n<s>assistant\n", False),
        ("yo!</s>", True),
        ("\n<s>user\nmore</s>\n<s>assistant\n", False),
        ("no</s>", True),
        ("\n", False),
    ]


def test_pieces_join_to_the_whole_template(encoder):
    messages = chat(("user", "hé 你"), ("assistant", "ça"), ("user", "?"))["messages"]
    piece = encoder.encode(record({"messages": messages}))
    whole = encoder.fast(
        encoder.tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False
    ).input_ids
    assert piece.tokens.tolist() == whole


def test_prompt_and_completion(encoder):
    piece = encoder.encode(record({"prompt": "2+2=", "completion": "4"}))
    assert shown(piece) == [("2+2=", False), ("4<e>", True)]
    assert shown(encoder.encode(record({"prompt": "", "completion": "4"}))) == [("4<e>", True)]


def test_tokens_and_mask(encoder):
    piece = encoder.encode(record({"tokens": [0, 5, END, 7, END], "mask": [0, 1, 1, 0, 1]}))
    assert piece.tokens.tolist() == [0, 5, END, 7, END]
    assert piece.eligible.tolist() == [False, True, True, False, True]  # a real end token keeps its loss
    assert piece.restarts == (1, 3, 4)


def test_an_answer_without_an_end_token_ends_with_its_text(tmp_path):
    plain = encoder_of(tmp_path / "plain", "{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert shown(plain.encode(record(chat(("user", "a"), ("assistant", "b"))))) == [
        ("a\n", False),
        ("b", True),
        ("\n", False),
    ]


@pytest.mark.parametrize(
    "item, message",
    [
        ('{"messages": [', r"a\.jsonl:7: broken JSON at column 15"),
        ("[]", r"a\.jsonl:7: a line must be a JSON object"),
        ({"text": "x"}, r"a\.jsonl:7: an item has 'messages'.*this one has 'text'"),
        ({"messages": []}, r"a\.jsonl:7: 'messages' must be a list of objects"),
        ({"messages": [{"content": "x"}]}, r"a\.jsonl:7: 'messages' must be a list of objects"),
        ({"prompt": "x"}, r"a\.jsonl:7: 'completion' must be a string"),
        ({"tokens": [1, 2], "mask": [1]}, r"a\.jsonl:7: 2 tokens but 1 mask values"),
        ({"tokens": [1, "2"], "mask": [1, 1]}, r"a\.jsonl:7: 'tokens' must be a list of integers"),
        ({"tokens": [1], "mask": [2]}, r"a\.jsonl:7: 'tokens' must be a list of integers"),
        ({"tokens": [1, 999], "mask": [1, 1]}, r"a\.jsonl:7: token id 999 is outside the vocabulary of 261"),
        ({"tokens": [MASK], "mask": [1]}, r"a\.jsonl:7: the item contains the mask token \(id 257\)"),
        ({"prompt": "<|mask|>", "completion": "x"}, r"a\.jsonl:7: the item contains the mask token"),
    ],
)
def test_broken_items_are_refused_with_file_and_line(encoder, item, message):
    with pytest.raises(DataError, match=message):
        encoder.encode(record(item))


def test_a_template_that_drops_earlier_reasoning(tmp_path):
    """What the template writes around an answer is not supervised, and may differ between turns."""
    encoder = encoder_of(tmp_path / "thinking", THINKING)
    piece = encoder.encode(record(chat(("user", "a"), ("assistant", "x</t>b"), ("user", "c"), ("assistant", "d"))))
    assert shown(piece) == [
        ("<s>user:a</s><s>assistant:", False),
        ("b</s>", True),
        ("<s>user:c</s><s>assistant:(t)", False),
        ("d</s>", True),
    ]


def test_a_template_that_rewrites_the_answer_is_refused(tmp_path):
    twice = encoder_of(tmp_path / "twice", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template does not write message 1 once as it is"):
        twice.encode(record(chat(("user", "a"), ("assistant", "b"))))


def test_a_template_that_raises_is_refused_with_its_message(tmp_path):
    strict = encoder_of(tmp_path / "strict", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"a\.jsonl:7: the chat template refuses the messages: .*roles must alternate"):
        strict.encode(record(chat(("user", "a"), ("assistant", "b"))))


def test_messages_need_a_template(tmp_path):
    with pytest.raises(DataError, match="'messages' need a tokenizer with a chat template"):
        encoder_of(tmp_path / "none", None).encode(record(chat(("user", "a"))))
    null = ConversationEncoder(load_tokenizer(TokenizerSource("NullTokenizer", vocab_size=20)))
    with pytest.raises(DataError, match="'messages' need"):
        null.encode(record(chat(("user", "a"))))
    assert null.encode(record({"prompt": "1 2", "completion": "3"})).tokens.tolist() == [1, 2, 3, 19]
