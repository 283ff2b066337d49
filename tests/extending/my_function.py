import datetime


def weekday(year: int, month: int, day: int) -> str:
    """Return the day of the week of a date.

    Args:
        year: Year from 1 on.
        month: Month from 1 to 12.
        day: Day of the month.
    """
    try:
        return f"{datetime.date(year, month, day):%A}"
    except ValueError as error:
        return f"error: {error}"
