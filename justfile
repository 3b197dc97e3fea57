# Shortcuts for people who have `just`; everything here is one line of ./start.

# lint, types and tests
check:
    ./start check

# tests only, with any pytest arguments
test *arguments:
    ./start test {{arguments}}

# regenerate the help blocks and the README transcript
docs:
    ./start docs

# talk to the default pair
chat *arguments:
    ./start chat {{arguments}}
