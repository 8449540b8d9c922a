"""What clients ask of the shape of answers: tools, schemas, and the form that follows from them.

Knows no worker, and no API's spelling of an answer.
"""
