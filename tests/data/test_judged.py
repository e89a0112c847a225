from verl.data.judged import judged_texts

PROMPT = [{"role": "user", "content": "1+2"}]


def test_conversations_are_rendered_whole_and_padded_on_the_right(tiny_tokenizer):
    batch = judged_texts([PROMPT, PROMPT], ["3", "1+2=3"], tiny_tokenizer, max_length=64)
    expected = [
        tiny_tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", "content": text}], return_dict=False)
        for text in ("3", "1+2=3")
    ]
    lengths = batch.attention_mask.sum(dim=1).tolist()
    assert lengths == [len(ids) for ids in expected] and lengths[0] < lengths[1] == batch.input_ids.shape[1]
    assert [row[:length].tolist() for row, length in zip(batch.input_ids, lengths, strict=True)] == expected
    assert (batch.input_ids[0, lengths[0] :] == tiny_tokenizer.pad_token_id).all()


def test_long_conversations_lose_their_head(tiny_tokenizer):
    (whole,) = judged_texts([PROMPT], ["1+2=3"], tiny_tokenizer, max_length=64).input_ids.tolist()
    (cut,) = judged_texts([PROMPT], ["1+2=3"], tiny_tokenizer, max_length=4).input_ids.tolist()
    assert cut == whole[-4:]
