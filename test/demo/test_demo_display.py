from __future__ import annotations

import io

from rich.console import Console

from sglang_taper.demo.display import PlainBoard, board_for


def plain() -> tuple[PlainBoard, list[str]]:
    lines: list[str] = []
    return PlainBoard(lines.append), lines


def test_pieces_of_a_line_come_out_as_one_line() -> None:
    board, lines = plain()
    board.open("branch 1", "Hives", "branch")
    for piece in ("Bees", " need", " room", ".\n", "And"):
        board.write("branch 1", piece, 1, False)
    assert lines == ["[branch 1] Hives", "[branch 1]   Bees need room."]


def test_the_last_piece_comes_out_with_the_number_of_tokens() -> None:
    board, lines = plain()
    board.open("summary", "summary", "stage")
    board.write("summary", "All is well", 3, True)
    assert lines[1:] == ["[summary]   All is well", "[summary] (3 tokens)"]


def test_a_long_line_is_cut_between_words_and_nothing_is_lost() -> None:
    board, lines = plain()
    board.open("a", "A", "branch")
    text = "honey " * 40
    board.write("a", text, 40, True)
    shown = [line.removeprefix("[a]   ") for line in lines[1:-1]]
    assert " ".join(shown).split() == text.split()
    assert max(map(len, shown)) <= 72


def test_a_word_longer_than_a_line_is_cut_too() -> None:
    board, lines = plain()
    board.open("a", "A", "branch")
    board.write("a", "x" * 200, 1, True)
    assert "".join(line.removeprefix("[a]   ") for line in lines[1:-1]) == "x" * 200


def test_interleaved_branches_keep_their_own_lines() -> None:
    board, lines = plain()
    for key in ("1", "2"):
        board.open(key, key, "branch")
    board.write("1", "one ", 1, False)
    board.write("2", "two\n", 1, False)
    board.write("1", "more\n", 2, False)
    assert lines[2:] == ["[2]   two", "[1]   one more"]


def test_of_a_serial_request_only_begin_and_end_are_told() -> None:
    board, lines = plain()
    board.open("serial 1", "The sky", "serial")
    board.write("serial 1", "is blue.\n", 3, False)
    board.write("serial 1", "The end", 5, True)
    assert lines == ["[serial 1] The sky", "[serial 1] (5 tokens)"]


def test_without_a_terminal_the_board_prints_plain_lines() -> None:
    out = io.StringIO()
    with board_for(Console(file=out)) as board:
        board.open("branch 1", "[Hives]", "branch")
    assert out.getvalue() == "[branch 1] [Hives]\n"


def test_a_terminal_shows_branches_side_by_side() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, height=40)
    with board_for(console) as board:
        board.open("serial", "A question", "serial")
        for index, word in enumerate(("left", "right")):
            board.open(f"branch {index}", word.upper(), "branch")
            board.write(f"branch {index}", f"the {word} text", 3, True)
    last = out.getvalue().split("A question")[-1]
    assert any("3: LEFT" in line and "3: RIGHT" in line for line in last.split("\n"))
    assert any("left text" in x and "right text" in x for x in last.split("\n"))


def test_a_terminal_shows_the_end_of_a_long_text() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=40)
    with board_for(console) as board:
        board.open("branch 1", "Hives", "branch")
        board.write("branch 1", "begin " + "honey " * 200 + "end", 202, True)
    assert "end" in out.getvalue()
    assert "begin" not in out.getvalue()
