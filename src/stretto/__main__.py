"""`python -m stretto` and the `stretto` command. Importing the commands takes a third of a second, and Ctrl-C may come in it."""


def main() -> None:
    try:
        from stretto.cli import main as command

        command()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
