from megatron.core.models.gpt.vocabulary_size import padded_vocabulary


def test_padding():
    assert padded_vocabulary(50257, 128, 1) == 50304
    assert padded_vocabulary(50257, 128, 8) == 51200
    assert padded_vocabulary(1024, 128, 8) == 1024
    assert padded_vocabulary(257, 128, 1) == 384
