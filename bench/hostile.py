"""wip"""


def fuzz(kind):
    yield {}
