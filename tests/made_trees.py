"""Trees made to be judged: what the self-tests of the tests that read the whole tree share. A good tree must have no
fault, and a bad one, which is the good one with a file or more put in, exactly the one fault that it was made for."""

import tempfile
from pathlib import Path


def write_tree(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def told(wrong, num_trees):
    """Prints what was judged wrongly; the exit status."""
    for line in wrong:
        print(line)
    print(f"self-test: {num_trees} trees, {len(wrong)} judged wrongly")
    return 1 if wrong else 0


def judge(faults_in, good_tree, bad_trees):
    """faults_in(root): a list of lines. bad_trees: pairs of {name: text} and a piece of the message that must come."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_tree(root, good_tree)
        if faults := faults_in(root):
            wrong.append(f"a good tree is called bad: {faults}")
        for files, message in bad_trees:
            write_tree(root, files)
            faults = faults_in(root)
            if len(faults) != 1 or message not in faults[0]:
                wrong.append(f"{', '.join(files)}: found {faults}, expected one fault with '{message}'")
            for name in files:
                (root / name).unlink()
    return told(wrong, len(bad_trees) + 1)


def of_one_file(bad_files):
    """{name: (text, message)} as judge() wants them."""
    return [({name: text}, message) for name, (text, message) in bad_files.items()]
