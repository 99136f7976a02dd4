import json

from skyrl_train.tasks.tiny import VOCABULARY, addition_rows, model_config, write_rows
from tests.support.tiny import tiny_tokenizer, write_tiny_model


def pair(row):
    return tuple(sorted(row["extra_info"].values()))


def test_no_validation_sum_occurs_in_training_in_either_order():
    train, validation = addition_rows(0)
    assert len(validation) == 500 and len(train) > 8900
    assert len({pair(r) for r in validation}) == 500
    assert not {pair(r) for r in validation} & {pair(r) for r in train}
    assert len({r["prompt"][0]["content"] for r in train}) == len(train)


def test_rows_say_the_sum_and_fit_the_tokenizer():
    tokenizer = tiny_tokenizer()
    for row in [row for rows in addition_rows(1) for row in rows]:
        text = row["prompt"][0]["content"]
        a, b = text.removesuffix("=").split("+")
        assert row["reward_spec"]["ground_truth"] == str(int(a) + int(b))
        assert tokenizer.unk_token_id not in tokenizer.encode(text)


def test_split_depends_on_the_seed_alone():
    assert addition_rows(3) == addition_rows(3)
    assert addition_rows(3)[1] != addition_rows(4)[1]


def test_written_rows_are_json_lines(tmp_path):
    rows = addition_rows(0)[1]
    write_rows(tmp_path / "new" / "a.jsonl", rows)
    assert [json.loads(line) for line in (tmp_path / "new" / "a.jsonl").read_text().splitlines()] == rows


def test_every_character_is_one_token_and_every_id_has_a_text():
    tokenizer = tiny_tokenizer()
    text = "".join(VOCABULARY[4:])
    assert tokenizer.encode(text) == list(range(4, 64))
    assert tokenizer.decode(range(4, 64)) == text
    assert len(tokenizer) == model_config().vocab_size == 64
    assert tokenizer.encode("A\n\n") == [tokenizer.unk_token_id] + [VOCABULARY.index("\n")] * 2


def test_tiny_model_folder_loads_as_a_hugging_face_model_with_its_tokenizer(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_tiny_model(tmp_path, num_hidden_layers=3, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert len(model.model.layers) == 3
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "37+48="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == tiny_tokenizer().encode("37+48=")
    assert (tokenizer.eos_token_id, model.config.eos_token_id) == (1, 1)
