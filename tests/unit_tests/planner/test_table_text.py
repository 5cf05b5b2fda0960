from megatron.planner.communication import Rates
from megatron.planner.model_tables import ModelRun, all_tables
from megatron.planner.table_text import model_text, rows_text


def test_columns_are_as_wide_as_their_widest_word():
    text = rows_text(["a", "long", "b"], [["wider", "x", "1"], ["y", "z", "22"]])
    assert text == "a      long  b\nwider  x     1\ny      z     22\n"


def test_a_model_in_words():
    run = ModelRun(80, 8192, 64, 2048, num_microbatches=4)
    lines = model_text(all_tables(run, Rates(600e12, 340e9)), run).splitlines()
    assert lines[0] == (
        "64,424,509,440 parameters (12 * layers * hidden^2) over 64 ranks; a step of 4 microbatches"
    )
    assert lines[5].split() == ["optim_grads_params", "18.119", "640", "320", "0", "2029.37"]
    assert "weights and gradients   2048           0.537" in lines
