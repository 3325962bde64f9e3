"""The history of the database's schema. `netlimit db upgrade` takes the steps that a database lacks."""
