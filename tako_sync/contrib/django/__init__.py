"""Django: an app with settings, checks, commands and an admin page; views, commands and
transactions under leases; rows that know the fence they were written under.

``INSTALLED_APPS = [..., "tako_sync.contrib.django"]`` and ``TAKO = {...}`` in the settings.

    views          guard: a view under a lease
    transactions   hold(until_commit=True): a lease that outlasts the transaction
    commit, atomic when a transaction ends, and who ends it
    fenced         FencedModel: writes of an older holder are refused
    leased         LeasedCommandMixin: a management command that runs once at a time
    testing        TakoTestMixin: for test cases
    conf, checks, admin, models, apps
"""
