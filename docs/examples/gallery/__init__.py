"""The gallery: a button that rebuilds an index, and collapses what is pressed meanwhile.

reindex        the work and its lease, without a framework
page.html      the button
with_flask     both behind Flask
with_django    both behind Django
"""
