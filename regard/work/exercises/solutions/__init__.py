"""Reference solutions of the exercises.

The code below a `# TODO` comment is what students write: their notebook has the comment and `raise
NotImplementedError` instead, the teacher's notebook has the code without the comment.
"""
